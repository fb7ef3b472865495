# SPDX-License-Identifier: Apache-2.0
"""From the candidate's arguments to those of its single-device reference.

Everything that spreads the model or reorders work is reset; everything that defines the numbers
(model, data, optimizer, precision) stays: see :mod:`megatron_ttrace.mcore.options`. Two values that
Megatron derives from the layout are carried over: the global batch size and the padded vocabulary
(megatron/training/vocab_utils.py).
"""

import json
from pathlib import Path
from typing import Any

from megatron_ttrace.jobs.settings import Settings
from megatron_ttrace.mcore.arguments import MegatronArguments
from megatron_ttrace.mcore.options import decisions
from megatron_ttrace.trace.errors import reported


def overrides_of(args: MegatronArguments) -> dict[str, Any]:
    """The values a reference must take over from a *validated* candidate."""
    return {
        "global_batch_size": args.global_batch_size,
        "make_vocab_size_divisible_by": args.make_vocab_size_divisible_by
        * args.tensor_model_parallel_size,
    }


def apply(args: Any, settings: Settings) -> None:
    """Turn a parsed command line into the reference's, before Megatron validates it.

    Raises ``TTraceError`` when the overrides file is unreadable.
    """
    if getattr(args, "use_checkpoint_args", False):
        # Megatron would ask for a checkpoint, which a reference does not load.
        from megatron.training.checkpointing import load_args_from_checkpoint

        for option in ("pretrained_checkpoint", "load"):
            load_args_from_checkpoint(args, load_arg=option)
        args.use_checkpoint_args = False
    overrides = {} if settings.overrides is None else read_overrides(settings.overrides)
    chosen = explicit(settings.reference_args)
    for name, value in {**decisions.derive(args), **overrides}.items():
        if hasattr(args, name) and name not in chosen:
            setattr(args, name, value)
    pattern = getattr(args, "hybrid_layer_pattern", None)
    if pattern and "hybrid_layer_pattern" not in chosen:
        # Where pipeline stages end (``Symbols.PIPE``, hybrid_layer_allocation.py).
        args.hybrid_layer_pattern = pattern.replace("|", "")


def explicit(reference_args: str) -> set[str]:
    """Names of the arguments that ``--ttrace-reference-args`` sets; they win over the derived."""
    flags = [word.split("=")[0] for word in reference_args.split() if word.startswith("--")]
    names = {flag.removeprefix("--").replace("-", "_") for flag in flags}
    return names | {option for flag in flags if (option := decisions.option_of(flag))}


def read_overrides(path: Path) -> dict[str, Any]:
    """The overrides written for a reference run."""
    with reported(f"{path} cannot be read", OSError, ValueError, KeyError):
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["overrides"]
    return values
