# SPDX-License-Identifier: Apache-2.0
"""Which runs cannot be traced, and what the user is told of those that can."""

from __future__ import annotations

import os
from collections.abc import Callable

from megatron_ttrace.errors import TTraceError
from megatron_ttrace.mcore.arguments import MegatronArguments
from megatron_ttrace.mcore.flags import Settings
from megatron_ttrace.mcore.options import decisions
from megatron_ttrace.runtime import low_precision

SHRUNK = "TTRACE_SHRUNK"
"""Environment variable: what the job under check stands for, if that is a larger one."""

Refusal = Callable[[MegatronArguments, Settings], str]
"""Why a run cannot be traced; empty when this is no reason."""


def starts_from_checkpoint(args: MegatronArguments) -> bool:
    """Whether this run starts from a checkpoint."""
    from megatron.training.checkpointing import checkpoint_exists

    paths = (args.load, getattr(args, "pretrained_checkpoint", None))
    return any(path is not None and checkpoint_exists(path) for path in paths)


def isolates(args: MegatronArguments, settings: Settings) -> bool:
    """Whether modules are checked one by one, with the reference's inputs."""
    return settings.isolate or low_precision.is_isolated(args)


def _refused(args: MegatronArguments, settings: Settings) -> str:
    return next(iter(decisions.refusals(args)), "")


def _rampup(args: MegatronArguments, settings: Settings) -> str:
    if settings.role == "candidate" and args.rampup_batch_size and settings.iterations != (1,):
        return "--rampup-batch-size: only --ttrace-iterations 1 can be traced"
    return ""


def _torch_fsdp2(args: MegatronArguments, settings: Settings) -> str:
    if getattr(args, "use_torch_fsdp2", False):
        return (
            "--use-torch-fsdp2: its sharded weights are not captured; check the same job with "
            "--use-megatron-fsdp or --use-distributed-optimizer"
        )
    return ""


def _loaded_fsdp(args: MegatronArguments, settings: Settings) -> str:
    if getattr(args, "use_megatron_fsdp", False) and starts_from_checkpoint(args):
        return "--use-megatron-fsdp with --load: a loaded start is not handed over"
    return ""


REFUSALS: tuple[Refusal, ...] = (_refused, _rampup, _torch_fsdp2, _loaded_fsdp)


def require(args: MegatronArguments, settings: Settings) -> None:
    """Refuse a run that cannot be traced.

    Raises:
        TTraceError: with the first reason.
    """
    for refusal in REFUSALS:
        if why := refusal(args, settings):
            raise TTraceError(why)


def notices(args: MegatronArguments, settings: Settings) -> list[str]:
    """What the report says about how this run is checked."""
    found = []
    if isolates(args, settings) and not settings.isolate:
        found.append(low_precision.NOTICE)
    if settings.reference is not None and settings.allow_other_megatron:
        found.append("the reference may have been made by another Megatron")
    if told := os.environ.get(SHRUNK):
        found.append(told)
    return found
