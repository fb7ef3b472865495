# SPDX-License-Identifier: Apache-2.0
"""The ``--ttrace`` flags, registered in Megatron's own parser, and their typed form."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NoReturn

from megatron_ttrace.errors import TTraceError
from megatron_ttrace.mcore import reference_layout
from megatron_ttrace.trace.budget import DEFAULT_MB, LEAST_MB, MOST_MB

ROLES = ("candidate", "reference")
_MOST_ITERATIONS = 1000
INITS = ("reveal", "megatron")
MOST_SEEDS = 1000
MOST_TIMEOUT = 366 * 86400.0
MOST_RANKS = 4096
"""The most ranks that ``ttrace`` starts on one machine."""
DEFAULT_RANKS = 8
"""Ranks of a job that is made smaller: three axes of 2. More ranks than that share two cores badly,
fewer would take three jobs for what one does, and miss what only three axes together show."""
_MOST_PATH, _MOST_NAME = 4096, 255
_INTEGER = re.compile(r"[+-]?[0-9]{1,19}")
_NUMBER = re.compile(
    r"[+-]?(?:[0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})(?:[eE][+-]?[0-9]{1,3})?"
)
DEFAULT_TIMEOUT = 1800.0
DEFAULT_ALLOW_UNCHECKED = 0.10


class Keep(StrEnum):
    """The tensors that stay on disk after a check; reports stay always."""

    NONE = "none"
    """Neither the reference nor any tensor of the candidate."""
    FAILED = "failed"
    """The reference, which later checks use again, and failed tensors of the candidate."""
    ALL = "all"
    """All tensors of both."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What the user asked for.

    Attributes:
        directory: where traces and reports go.
        iterations: the training iterations to trace, 1-based, ascending.
        reference: an existing reference trace, or ``None`` to make one.
        reference_args: Megatron arguments appended to the derived reference arguments.
        reference_layout: of a reference on several ranks; ``None`` for one device.
        allow_other_megatron: whether ``reference`` may be of another Megatron than this run's.
        save_candidate: keep the candidate's tensors for ``ttrace compare``.
        isolate: feed every module the reference's inputs, so that no error propagates.
        exit_after: stop after the check with the contract's exit code.
        bug: known bug to re-create in the candidate, or ``None``.
        device: ``auto`` or ``cpu``.
        init: start values: ``reveal`` (nothing at zero or one) or ``megatron`` (its distributions).
        seeds: number of perturbed reference replays that the tolerances are estimated from;
            ``None``: as many as they need.
        wandb: whether to log to Weights & Biases.
        wandb_online: whether a run of our own may be sent there.
        timeout: seconds after which whatever does not answer counts as lost.
        memory_mb: megabytes that a rank may use beyond training's own.
        keep: the tensors that stay on disk.
        allow_unchecked: share of tensors, between 0 and 1, that may be ``unchecked`` in an
            equivalent run.
        role: ``candidate`` for what the user starts, ``reference`` for the run we start.
        overrides: JSON file with the values that a reference run takes over; internal.
    """

    directory: Path
    iterations: tuple[int, ...] = (1,)
    reference: Path | None = None
    reference_args: str = ""
    reference_layout: reference_layout.Layout | None = None
    allow_other_megatron: bool = False
    save_candidate: bool = False
    isolate: bool = False
    exit_after: bool = False
    bug: str | None = None
    device: str = "auto"
    init: str = "reveal"
    seeds: int | None = None
    wandb: bool = True
    wandb_online: bool = False
    timeout: float = DEFAULT_TIMEOUT
    memory_mb: int = DEFAULT_MB
    keep: Keep = Keep.FAILED
    allow_unchecked: float = DEFAULT_ALLOW_UNCHECKED
    role: str = "candidate"
    overrides: Path | None = None


class Parser(argparse.ArgumentParser):
    """A parser of our command lines: errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """See :class:`argparse.ArgumentParser`. Raises ``TTraceError``."""
        from megatron_ttrace.trace.sanitise import NOTE_LIMIT, clean

        raise TTraceError(f"{clean(message, NOTE_LIMIT)} (see {self.prog} --help)")


def path(text: str) -> Path:
    """A path from the command line, for argparse.

    Raises:
        argparse.ArgumentTypeError: when no file system accepts it.
    """
    parts = text.split("/")
    printable = ascii(text if len(text) <= 60 else f"{text[:28]}...{text[-28:]}")
    if "\0" in text:
        raise argparse.ArgumentTypeError(f"{printable} holds a zero byte")
    if len(os.fsencode(text)) >= _MOST_PATH or any(
        len(os.fsencode(part)) > _MOST_NAME for part in parts
    ):
        raise argparse.ArgumentTypeError(f"{printable} is too long for a path")
    if not text.isprintable():
        raise argparse.ArgumentTypeError(f"{printable} holds unprintable characters")
    return Path(text)


def _path_text(text: str) -> str:
    """As :func:`path`, but text: Megatron's arguments are copied as text."""
    return str(path(text)) if text else text


def integer(least: int = -(1 << 63), most: int = (1 << 63) - 1) -> Callable[[str], int]:
    """For argparse: an integer between two, in ASCII digits."""

    def convert(text: str) -> int:
        value = int(text) if _INTEGER.fullmatch(text) else None
        if value is None or not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"{text[:40]!a}: give an integer from {least} to {most}"
            )
        return value

    return convert


def number(text: str) -> float:
    """For argparse: a finite number, in ASCII digits."""
    value = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text[:40]!a}: give a number")
    return value


def check_single(args: argparse.Namespace, *names: str) -> None:
    """Refuse ``--flag=--``, which argparse turns into an empty list before it checks types.

    Raises:
        TTraceError: when one of these flags has no value.
    """
    for name in names:
        if isinstance(getattr(args, name), list):
            raise TTraceError(f"--{name.replace('_', '-')}: give a value")


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the ``ttrace`` group to Megatron's parser and return the parser, as Megatron does."""
    group = parser.add_argument_group(
        "ttrace", "Check this run against a single-device reference (megatron_ttrace)."
    )
    group.add_argument(
        "--ttrace",
        action="store_true",
        help="Check this run: compare its first iterations with a single-device reference.",
    )
    group.add_argument(
        "--ttrace-dir",
        default="ttrace-out",
        type=_path_text,
        metavar="DIR",
        help="Directory for traces and reports, visible to all ranks (default ttrace-out).",
    )
    group.add_argument(
        "--ttrace-iterations",
        default="1",
        metavar="N|A-B,...",
        help="Iterations to trace: numbers or ranges from 1, e.g. 1-2,5 (default 1).",
    )
    group.add_argument(
        "--ttrace-reference",
        default=None,
        type=_path_text,
        metavar="DIR",
        help="Use this reference trace instead of making one.",
    )
    group.add_argument(
        "--ttrace-allow-other-megatron",
        action="store_true",
        help="Accept a --ttrace-reference that was made by another Megatron.",
    )
    group.add_argument(
        "--ttrace-reference-args",
        default="",
        metavar='"ARGS"',
        help="Arguments to add to those of the reference, e.g. another attention implementation.",
    )
    group.add_argument(
        "--ttrace-reference-layout",
        default=None,
        metavar='"tp=N pp=N"',
        help="Make the reference on several ranks, for a model that does not fit one device; the "
        "layout is checked against one device first, on a shrunk job.",
    )
    group.add_argument(
        "--ttrace-save-candidate",
        action="store_true",
        help="Save all tensors of the candidate under DIR/candidate, for 'ttrace compare'.",
    )
    group.add_argument(
        "--ttrace-isolate",
        action="store_true",
        help="Give every module the reference's inputs, so that errors do not propagate.",
    )
    group.add_argument(
        "--ttrace-exit",
        action="store_true",
        help="Stop after the check: exit code 0 equivalent, 1 diverged, 2 could not check.",
    )
    group.add_argument(
        "--ttrace-bug",
        default=None,
        metavar="ID",
        help="Re-introduce a known bug ('ttrace eval bugs list'), to test the checker.",
    )
    group.add_argument(
        "--ttrace-device",
        default="auto",
        choices=("auto", "cpu"),
        help="cpu: train on the CPU over gloo even if an accelerator is present (default auto).",
    )
    group.add_argument(
        "--ttrace-init",
        default="reveal",
        choices=INITS,
        help="Start values: 'reveal' (default) sets nothing to zero or one, so that bugs "
        "are visible; 'megatron' uses Megatron's own distributions.",
    )
    group.add_argument(
        "--ttrace-seeds",
        default=None,
        type=integer(),
        metavar="N",
        help="Number of perturbed replays of the reference from which tolerances are estimated "
        "(default: as many as they need, 2 to 4).",
    )
    group.add_argument(
        "--ttrace-wandb",
        action="store_true",
        help="Send the verdicts to W&B (default: into the run of the job; without one, offline).",
    )
    group.add_argument(
        "--ttrace-no-wandb", action="store_true", help="Do not log the verdicts to W&B."
    )
    group.add_argument(
        "--ttrace-timeout",
        default=DEFAULT_TIMEOUT,
        type=number,
        metavar="SECONDS",
        help="Time limit for a reference run, and for a rank that does not answer (default 1800).",
    )
    group.add_argument(
        "--ttrace-allow-unchecked",
        default=DEFAULT_ALLOW_UNCHECKED,
        type=number,
        metavar="SHARE",
        help="Share of tensors that may be unchecked; above it the answer is 'could not check' "
        "(default 0.1).",
    )
    group.add_argument(
        "--ttrace-memory-mb",
        default=DEFAULT_MB,
        type=integer(LEAST_MB, MOST_MB),
        metavar="MB",
        help="Memory of a rank for tensors that wait to be compared or written, for pages of the "
        f"reference, and for copies of the training state (default {DEFAULT_MB}).",
    )
    group.add_argument(
        "--ttrace-keep",
        default=Keep.FAILED.value,
        choices=tuple(Keep),
        help="Tensors that stay on disk: 'none'; the reference and 'failed' ones of the candidate "
        "(default); or 'all', as with --ttrace-save-candidate.",
    )
    group.add_argument("--ttrace-role", default="candidate", choices=ROLES, help=argparse.SUPPRESS)
    group.add_argument("--ttrace-overrides", default=None, help=argparse.SUPPRESS)
    return parser


def split(
    arguments: Sequence[str], before: argparse.Namespace | None = None
) -> tuple[argparse.Namespace, list[str]]:
    """Our flags, and the other arguments of a training script.

    Args:
        arguments: both, mixed.
        before: values that our flags have already; those in ``arguments`` win.

    Raises:
        TTraceError: when one of our flags cannot have its value, or does not exist.
    """
    parser = add_arguments(Parser(prog="ttrace check", add_help=False, allow_abbrev=False))
    ours, theirs = parser.parse_known_args(list(arguments), before)
    for word in theirs:
        if word.startswith("--ttrace"):
            flag = word.partition("=")[0]
            meant = similar(flag, parser._option_string_actions)
            parser.error(f"unrecognized arguments: {flag}{meant}")
    return ours, theirs


def word_of(path: os.PathLike[str] | str) -> str:
    """A path as a word that no parser takes for a flag."""
    text = os.fspath(path)
    return os.path.join(os.curdir, text) if text.startswith("-") else text


def similar(word: str, known: Iterable[str]) -> str:
    """What a mistyped word may have meant, as the end of a sentence."""
    found = difflib.get_close_matches(word, list(known), n=2)
    return f"; did you mean {' or '.join(found)}?" if found else ""


def parse_iterations(text: str) -> tuple[int, ...]:
    """``"1-2,5"`` -> ``(1, 2, 5)``.

    Raises:
        TTraceError: when the text is not a list of positive numbers and ascending ranges.
    """
    chosen: set[int] = set()
    shown = ascii(text if len(text) <= 40 else f"{text[:40]}...")
    for part in text.split(",", _MOST_ITERATIONS):
        match = re.fullmatch(r" *([0-9]{1,12})(?: *- *([0-9]{1,12}))? *", part)
        first = int(match[1]) if match else 0
        last = int(match[2] or match[1]) if match else 0
        if first < 1 or last < first or last - first > _MOST_ITERATIONS:
            raise TTraceError(
                f"--ttrace-iterations {shown}: give numbers or ranges from 1, e.g. 1 or 1-2,5, "
                f"of at most {_MOST_ITERATIONS} iterations"
            )
        chosen.update(range(first, last + 1))
    return tuple(sorted(chosen))


def settings_from_args(args: argparse.Namespace) -> Settings:
    """The typed settings of a parsed command line.

    Raises:
        TTraceError: on values that argparse cannot check.
    """
    check_single(args, *(name for name in vars(args) if name.startswith("ttrace_")))
    if args.ttrace_seeds is not None and args.ttrace_seeds < 1:
        raise TTraceError(f"--ttrace-seeds {args.ttrace_seeds}: at least 1 replay is needed")
    if args.ttrace_seeds is not None and args.ttrace_seeds > MOST_SEEDS:
        raise TTraceError(f"--ttrace-seeds {args.ttrace_seeds}: give at most {MOST_SEEDS} replays")
    if not 0 < args.ttrace_timeout <= MOST_TIMEOUT:
        raise TTraceError(
            f"--ttrace-timeout {args.ttrace_timeout}: give seconds above 0, at most a year"
        )
    if not 0 <= args.ttrace_allow_unchecked <= 1:
        raise TTraceError(
            f"--ttrace-allow-unchecked {args.ttrace_allow_unchecked}: give a share from 0 to 1"
        )
    if args.ttrace_wandb and args.ttrace_no_wandb:
        raise TTraceError("--ttrace-wandb and --ttrace-no-wandb: give one of them")
    keep = Keep(args.ttrace_keep)
    if args.ttrace_save_candidate and keep is Keep.NONE:
        raise TTraceError("--ttrace-save-candidate and --ttrace-keep none: give one of them")
    layout = args.ttrace_reference_layout
    reference = Path(args.ttrace_reference) if args.ttrace_reference else None
    if reference is not None and not reference.is_dir():
        raise TTraceError(
            f"--ttrace-reference {reference}: no such directory; omit the flag to make one"
        )
    return Settings(
        directory=Path(args.ttrace_dir),
        iterations=parse_iterations(args.ttrace_iterations),
        reference=reference,
        reference_args=args.ttrace_reference_args,
        reference_layout=None if layout is None else reference_layout.parse(layout),
        allow_other_megatron=args.ttrace_allow_other_megatron,
        save_candidate=args.ttrace_save_candidate or keep is Keep.ALL,
        isolate=args.ttrace_isolate,
        exit_after=args.ttrace_exit,
        bug=args.ttrace_bug,
        device=args.ttrace_device,
        init=args.ttrace_init,
        seeds=args.ttrace_seeds,
        wandb=not args.ttrace_no_wandb,
        wandb_online=args.ttrace_wandb,
        timeout=args.ttrace_timeout,
        memory_mb=args.ttrace_memory_mb,
        keep=keep,
        allow_unchecked=args.ttrace_allow_unchecked,
        role=args.ttrace_role,
        overrides=Path(args.ttrace_overrides) if args.ttrace_overrides else None,
    )
