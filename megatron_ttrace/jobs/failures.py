# SPDX-License-Identifier: Apache-2.0
"""The exception that ends a rank: where it was raised, and whether docs/findings.md knows it.

This imports neither torch nor Megatron: a script may fail before it has.
"""

import dataclasses
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron_ttrace.trace.ends import EndRecord, Frame
from megatron_ttrace.trace.errors import TTraceError, without_secrets
from megatron_ttrace.trace.sanitise import NOTE_LIMIT, clean

_OWN = str(Path(__file__).parents[1]) + os.sep
_TRANSPARENT = tuple(f"{_OWN}{room}{os.sep}" for room in ("capture", "cpu"))
"""What is raised below our hooks and our kernels is about the code that called them."""
_SITES = frozenset(("site-packages", "dist-packages"))
"""Folders of packages, in whichever environment: one may see those of another."""
_COMMUNICATION = f"torch{os.sep}distributed{os.sep}"


@dataclasses.dataclass(frozen=True, slots=True)
class KnownFailure:
    """An exception that a fault of Megatron's raises.

    ``finding`` is the number of the fault in docs/findings.md. ``file`` and ``function`` are those
    of the innermost frame, below ``megatron/``; or the name of one of Megatron's scripts. ``when``:
    whether a job with these validated arguments has the fault.
    """

    finding: int
    error: type[BaseException]
    file: str
    function: str
    when: Callable[[Any], bool]
    advice: str


KNOWN = (
    KnownFailure(
        finding=1,
        error=RuntimeError,
        file="core/optimizer/distrib_optimizer.py",
        function="_set_main_param_and_optimizer_states",
        when=lambda args: bool(
            args.use_distributed_optimizer and args.load and not (args.bf16 or args.fp16)
        ),
        advice="add --dist-ckpt-optim-fully-reshardable, or train in --bf16",
    ),
    KnownFailure(
        finding=12,
        error=RuntimeError,
        file="core/transformer/mlp.py",
        function="forward",
        when=lambda args: bool(args.num_experts and args.add_bias_linear),
        advice="add --disable-bias-linear; a job on one rank crashes without ttrace, too",
    ),
    KnownFailure(
        finding=32,
        error=TypeError,
        file="training/training.py",
        function="get_train_valid_test_num_samples",
        when=lambda args: args.eval_interval is None,
        advice="add --eval-interval 1000",
    ),
    KnownFailure(
        finding=57,
        error=AttributeError,
        file="core/optimizer/distrib_optimizer.py",
        function="_collect_main_grad_data_for_unscaling",
        when=lambda args: bool(args.use_megatron_fsdp),
        advice="train in --bf16",
    ),
    KnownFailure(
        finding=57,
        error=IndexError,
        file="core/utils.py",
        function="_get_batch_on_this_cp_rank_per_sequence_balancing",
        when=lambda args: args.context_parallel_size > 1,
        advice="with context parallelism, train on one data set",
    ),
    KnownFailure(
        finding=57,
        error=RuntimeError,
        file="core/pipeline_parallel/schedules.py",
        function="custom_backward",
        when=lambda args: bool(
            args.moe_expert_capacity_factor is not None
            and getattr(args, "moe_router_padding_for_quantization", False)
        ),
        advice="omit --moe-expert-capacity-factor or --moe-router-padding-for-quantization",
    ),
    KnownFailure(
        finding=57,
        error=TypeError,
        file="pretrain_gpt.py",
        function="get_batch",
        when=lambda args: bool(getattr(args, "dataloader_inter_document_masking", False)),
        advice="omit --dataloader-inter-document-masking, or use at most two pipeline stages",
    ),
    *(
        KnownFailure(
            finding=57,
            error=error,
            file=f"core/transformer/{file}.py",
            function="clip_qk",
            when=lambda args: bool(getattr(args, "qk_clip", False)),
            advice="omit --qk-clip; training crashes, too, once a score is above its threshold",
        )
        for file in ("attention", "multi_latent_attention")
        for error in (AttributeError, RuntimeError)
    ),
)


def record_of(error: BaseException, code: int, *, follows: bool = False) -> EndRecord:
    """What is known of an exception that ends a process; a :class:`TTraceError` is its message."""
    if isinstance(error, TTraceError):
        return EndRecord(code=code, at=0, message=str(error), follows=follows)
    frames = tuple(_frames(error))
    if isinstance(error, SystemExit):
        message = (
            clean(without_secrets(error.code), NOTE_LIMIT) if isinstance(error.code, str) else ""
        )
        kind = type(error).__name__ if message else ""
        return EndRecord(code=code, at=0, message=message, error=kind, frames=frames)
    known = _known(error, frames)
    raised = traceback.extract_tb(error.__traceback__)[-1:]
    # A bare "AssertionError" says nothing; the line that raised it does.
    text = str(error) or "".join(frame.line or "" for frame in raised)
    return EndRecord(
        code=code,
        at=0,
        message=clean(without_secrets(" ".join(text.split())), NOTE_LIMIT),
        error=type(error).__name__,
        frames=frames,
        follows=follows or _is_communication(error),
        finding=known.finding if known else 0,
        advice=known.advice if known else "",
    )


def _known(error: BaseException, frames: tuple[Frame, ...]) -> KnownFailure | None:
    args = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
    if args is None or not frames:
        return None
    innermost = frames[0]
    places = (innermost.file.removeprefix("megatron/"), Path(innermost.file).name)
    for known in KNOWN:
        is_here = known.file in places and known.function == innermost.function
        if type(error) is known.error and is_here and known.when(args):
            return known
    return None


def _is_communication(error: BaseException) -> bool:
    """Whether a collective failed, or the key-value store: mostly because another rank ended."""
    if not isinstance(error, RuntimeError):  # PyTorch's errors of this kind are
        return False
    innermost = traceback.extract_tb(error.__traceback__)[-1:]
    return type(error).__name__.startswith("Dist") or any(
        _COMMUNICATION in frame.filename for frame in innermost
    )


def _frames(error: BaseException) -> Iterator[Frame]:
    """Where an exception was raised, innermost first: code of Megatron and of the script.

    Nothing if it was raised in code of ours.
    """
    names = ("megatron.core", "megatron.training", "megatron.bridge")
    files = (getattr(sys.modules.get(name), "__file__", None) for name in names)
    folders = [f"{Path(file).parents[1]}{os.sep}" for file in files if file]
    paths = (sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    installed = [f"{path}{os.sep}" for path in paths if path]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = frame.filename
        folder = next((folder for folder in folders if file.startswith(folder)), "")
        if folder:
            shown = "megatron/" + file.removeprefix(folder)
        elif file.startswith((*_TRANSPARENT, "<")):
            continue
        elif file.startswith(_OWN):
            return
        elif file.startswith(tuple(installed)) or _SITES & {*Path(file).parts}:
            continue
        else:
            shown = os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else file
        yield Frame(shown, frame.lineno or 0, frame.name)
