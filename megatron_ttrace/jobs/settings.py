# SPDX-License-Identifier: Apache-2.0
"""The settings of a check: each flag is declared once, as a field of :class:`Settings`."""

import argparse
import dataclasses
import itertools
import os
import shlex
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from megatron_ttrace.jobs.flags import (
    Parser,
    integer,
    number,
    parse_iterations,
    path_text,
    shown,
    similar,
    word_of,
)
from megatron_ttrace.jobs.reference_layout import Layout
from megatron_ttrace.jobs.reference_layout import parse as parse_layout
from megatron_ttrace.trace.budget import DEFAULT_MB, LEAST_MB, MOST_MB
from megatron_ttrace.trace.errors import TTraceError

_ROLES = ("candidate", "reference", "state", "plan")
_INITS = ("reveal", "megatron")
_MOST_SEEDS = 1000
_MOST_TIMEOUT = 366 * 86400.0
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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """How a field of :class:`Settings` is given on a command line; a switch inverts its default.

    Attributes:
        name: with its dashes.
        help: a sentence; ``None`` for what our own processes alone give each other.
        details: what docs/flags-and-files.md adds to ``help``, as Markdown.
        metavar: of its value; ``None`` for a switch.
        choices: the values that it can have.
        word: reads the value of a command line. The result is plain: Megatron copies its parsed
            arguments, into checkpoints among others.
        value: makes the field's value of it.
        text: the reverse of both.
        valid: whether a field may have this value.
        asks: what to give instead of a value that is not valid.
        alias: its other name as an option of ``ttrace check`` and ``ttrace record``.
    """

    name: str
    help: str | None = None
    details: str = ""
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    word: Callable[[str], Any] = str
    value: Callable[[Any], Any] = lambda plain: plain
    text: Callable[[Any], str] = str
    valid: Callable[[Any], bool] = lambda value: True
    asks: str = ""
    alias: str = ""

    @property
    def dest(self) -> str:
        """Its name in what argparse returns."""
        return self.name.removeprefix("--").replace("-", "_")

    @property
    def is_switch(self) -> bool:
        """Whether it has no value."""
        return self.metavar is None and not self.choices

    def add(
        self,
        parser: argparse._ActionsContainer,
        *names: str,
        default: Any = argparse.SUPPRESS,
        dest: str = "",
    ) -> None:
        """Add it to a parser, by its name or these; absent from the result if not given."""
        names = names or (self.name,)
        more: dict[str, Any] = {"default": default, "dest": dest or self.dest}
        more["help"] = argparse.SUPPRESS if self.help is None else self.help
        if self.is_switch:
            parser.add_argument(*names, action="store_true", **more)
        elif self.choices:
            parser.add_argument(*names, choices=self.choices, **more)
        else:
            parser.add_argument(*names, type=self.word, metavar=self.metavar, **more)


CHECK = Flag(
    name="--ttrace",
    help="Compare the first iterations of this run with a single-device reference.",
)


def _flag(name: str, default: Any, **about: Any) -> Any:
    return dataclasses.field(default=default, metadata={"flag": Flag(name=name, **about)})


def _path_or_none(text: str) -> Path | None:
    return Path(text) if text else None


def _is_closed(text: str) -> bool:
    try:
        shlex.split(text)
    except ValueError:
        return False
    return True


def _blocks(iterations: Sequence[int]) -> list[list[int]]:
    # Within a block numbers grow as their places do.
    blocks = itertools.groupby(enumerate(iterations), lambda pair: pair[1] - pair[0])
    return [[iteration for _, iteration in block] for _, block in blocks]


def _iterations_text(iterations: Sequence[int]) -> str:
    """The reverse of :func:`parse_iterations`."""
    blocks = _blocks(iterations)
    return ",".join(f"{part[0]}-{part[-1]}" if part[1:] else f"{part[0]}" for part in blocks)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What the user asked for: the only declaration of our flags.

    Parsers, the words of command lines (:meth:`words`) and the table of docs/flags-and-files.md are
    derived from it.
    """

    directory: Path = _flag(
        "--ttrace-dir",
        Path("ttrace-out"),
        metavar="DIR",
        word=path_text,
        value=Path,
        help="Directory for traces and reports, visible to all ranks (default ttrace-out; "
        "of ttrace record: ttrace-record).",
    )
    iterations: tuple[int, ...] = _flag(
        "--ttrace-iterations",
        (1,),
        metavar="N|A-B,...",
        value=parse_iterations,
        text=_iterations_text,
        help="Iterations to trace, counted from the start of this run, e.g. 1-2,5 (default 1).",
    )
    """1-based, ascending."""
    reference: Path | None = _flag(
        "--ttrace-reference",
        None,
        metavar="DIR",
        word=path_text,
        value=_path_or_none,
        valid=Path.is_dir,
        asks="no such directory; omit the flag to make one",
        help="Use this reference trace; it must have the same configuration and Megatron.",
    )
    allow_other_megatron: bool = _flag(
        "--ttrace-allow-other-megatron",
        False,
        help="Accept a --ttrace-reference made by a different Megatron.",
    )
    reference_args: str = _flag(
        "--ttrace-reference-args",
        "",
        metavar='"ARGS"',
        valid=_is_closed,
        asks="close the quote",
        help="Additional arguments of the reference, e.g. a different attention implementation.",
    )
    reference_layout: Layout | None = _flag(
        "--ttrace-reference-layout",
        None,
        metavar='"tp=N pp=N"',
        value=parse_layout,
        help="Make the reference on several ranks, for a model that does not fit on one device.",
        details="See [scaling.md](scaling.md#when-the-model-does-not-fit-on-one-device).",
    )
    small: Path | None = _flag(
        "--ttrace-small",
        None,
        metavar="FILE",
        word=path_text,
        value=_path_or_none,
        valid=Path.is_file,
        asks="no such file; 'ttrace shrink' writes it",
        help="Shrink a configuration of Megatron-Bridge to the flags of Megatron-LM in this file.",
        details="`ttrace shrink` writes it.",
    )
    save_candidate: bool = _flag(
        "--ttrace-save-candidate",
        False,
        help="Save all tensors of the candidate in DIR/candidate, for 'ttrace compare'.",
    )
    isolate: bool = _flag(
        "--ttrace-isolate",
        False,
        help="Feed every module its reference's inputs, so that errors do not propagate.",
    )
    exit_after: bool = _flag(
        "--ttrace-exit",
        False,
        help="Stop after the check: exit code 0 equivalent, 1 diverged, 2 could not check.",
    )
    bug: str | None = _flag(
        "--ttrace-bug",
        None,
        metavar="ID",
        help="Add a known bug ('ttrace eval bugs list'), to test the checker.",
    )
    device: str = _flag(
        "--ttrace-device",
        "auto",
        choices=("auto", "cpu"),
        help="'cpu' trains on the CPU over gloo even if an accelerator is present.",
    )
    init: str = _flag(
        "--ttrace-init",
        "reveal",
        choices=_INITS,
        help="Start values: 'reveal' (default) makes bugs visible; 'megatron' uses Megatron's own "
        "distributions.",
        details="See [tolerance.md](tolerance.md#start-values-that-keep-tolerances-small).",
    )
    seeds: int | None = _flag(
        "--ttrace-seeds",
        None,
        metavar="N",
        word=integer(),
        valid=lambda count: 1 <= count <= _MOST_SEEDS,
        asks=f"give 1 to {_MOST_SEEDS} replays",
        help="Perturbed replays from which tolerances are estimated (default: 2 to 4, as needed).",
        details="See [tolerance.md](tolerance.md#how-many-replays).",
    )
    wandb_online: bool = _flag(
        "--ttrace-wandb",
        False,
        help="Log the verdicts to a new W&B run, if the job has none.",
        details="See [wandb.md](wandb.md).",
    )
    wandb: bool = _flag("--ttrace-no-wandb", True, help="Do not log the verdicts to W&B.")
    timeout: float = _flag(
        "--ttrace-timeout",
        DEFAULT_TIMEOUT,
        metavar="SECONDS",
        word=number,
        valid=lambda seconds: 0 < seconds <= _MOST_TIMEOUT,
        asks="give seconds above 0, at most a year",
        alias="--timeout",
        help="Time limit of a reference run, and of a silent rank "
        f"(default {DEFAULT_TIMEOUT:.0f}).",
        details="See [Waiting](#waiting).",
    )
    allow_unchecked: float = _flag(
        "--ttrace-allow-unchecked",
        DEFAULT_ALLOW_UNCHECKED,
        metavar="SHARE",
        word=number,
        valid=lambda share: 0 <= share <= 1,
        asks="give a share from 0 to 1",
        alias="--allow-unchecked",
        help="Share of the computed tensors that may be unchecked; above it the answer is 'could "
        f"not check' (default {DEFAULT_ALLOW_UNCHECKED}).",
    )
    memory_mb: int = _flag(
        "--ttrace-memory-mb",
        DEFAULT_MB,
        metavar="MB",
        word=integer(LEAST_MB, MOST_MB),
        help=f"Memory that a check may use on each rank (default {DEFAULT_MB}).",
        details="See [scaling.md](scaling.md#memory-and-disk-of-a-check).",
    )
    keep: Keep = _flag(
        "--ttrace-keep",
        Keep.FAILED,
        choices=tuple(map(str, Keep)),
        value=Keep,
        help="Tensors that stay on disk: 'none'; the reference and 'failed' tensors of the "
        "candidate (default); or 'all', as with --ttrace-save-candidate.",
    )
    role: str = _flag("--ttrace-role", "candidate", choices=_ROLES)
    """``candidate`` for what the user starts; we start a ``reference``, a run that records its
    ``state`` (``run/states.py``), or a ``plan``, which ends when its configuration is known."""
    plain: bool = _flag("--ttrace-plain", False)
    """A configuration of Megatron-Bridge in float32, without what ``transformers`` does not do."""
    overrides: Path | None = _flag("--ttrace-overrides", None, metavar="FILE", value=_path_or_none)
    """JSON file with the values that a reference run takes over, or what to record; a ``plan``
    writes its flags there."""

    @property
    def saves_candidate(self) -> bool:
        """Whether all tensors of the candidate are kept for ``ttrace compare``."""
        return self.save_candidate or self.keep is Keep.ALL

    @property
    def same_code(self) -> bool:
        """Whether the reference runs the code of the candidate."""
        return not (self.reference_args or self.allow_other_megatron)

    def blocks(self) -> list[list[int]]:
        """The traced iterations as runs of consecutive ones; each run is one rehearsal."""
        return _blocks(self.iterations)

    def unlogged(self, directory: Path) -> Self:
        """These settings for a check in another directory, of which W&B gets nothing."""
        return dataclasses.replace(self, directory=directory, wandb=False, wandb_online=False)

    def words(self) -> list[str]:
        """The flags that give these settings: the directory, and what differs from the default."""
        words = [FLAGS["directory"].name, word_of(self.directory)]
        for field in dataclasses.fields(self)[1:]:
            flag, value = FLAGS[field.name], getattr(self, field.name)
            if value != field.default:
                # One word, so that a value that starts with dashes is not taken for a flag.
                words.append(flag.name if flag.is_switch else f"{flag.name}={flag.text(value)}")
        return words

    def require_valid(self) -> None:
        """Raise ``TTraceError``, naming the flag, for values that a field cannot have."""
        for name, flag in FLAGS.items():
            value = getattr(self, name)
            if value is not None and not flag.valid(value):
                raise TTraceError(f"{flag.name} {value}: {flag.asks}")
        if self.wandb_online and not self.wandb:
            raise TTraceError("--ttrace-wandb and --ttrace-no-wandb: give one of them")
        if self.save_candidate and self.keep is Keep.NONE:
            raise TTraceError("--ttrace-save-candidate and --ttrace-keep none: give one of them")


FLAGS: dict[str, Flag] = {
    field.name: field.metadata["flag"] for field in dataclasses.fields(Settings)
}
"""Field of :class:`Settings` -> its flag."""
SWITCHES = frozenset({CHECK.name, *(flag.name for flag in FLAGS.values() if flag.is_switch)})
"""Names of our flags that have no value."""


def add_arguments(
    parser: argparse.ArgumentParser, *, aliases: bool = False
) -> argparse.ArgumentParser:
    """Add the ``ttrace`` group to Megatron's parser and return the parser, as Megatron does."""
    group = parser.add_argument_group(
        "ttrace", "Check this run against a single-device reference (megatron_ttrace)."
    )
    CHECK.add(group, default=False)
    for flag in FLAGS.values():
        flag.add(group, flag.name, *([flag.alias] if aliases and flag.alias else []))
    return parser


def settings_of(args: object, base: Settings = Settings()) -> Settings:
    """The settings of a parsed command line, ours or Megatron's; they override those of ``base``.

    They need not be valid: what follows may override them. Raises ``TTraceError`` for texts that
    mean nothing.
    """
    values: dict[str, Any] = {}
    for field in dataclasses.fields(Settings):
        flag = FLAGS[field.name]
        if not hasattr(args, flag.dest):
            continue
        value = getattr(args, flag.dest)
        if isinstance(value, list):
            # Of --flag=--, before argparse checks types.
            raise TTraceError(f"{flag.name}: give a value")
        values[field.name] = not field.default if flag.is_switch else flag.value(value)
    return dataclasses.replace(base, **values)


def split(arguments: Sequence[str], base: Settings = Settings()) -> tuple[Settings, list[str]]:
    """Our flags, which override ``base``, and the other arguments of a training script.

    Raises ``TTraceError`` when one of our flags cannot have its value, or does not exist.
    """
    parser = add_arguments(Parser(prog="ttrace check", add_help=False, allow_abbrev=False))
    ours, theirs = parser.parse_known_args(list(arguments))
    for word in theirs:
        if word.startswith("--ttrace"):
            flag = word.partition("=")[0]
            meant = similar(flag, shown(parser))
            parser.error(f"unrecognized arguments: {flag}{meant}")
    settings = settings_of(ours, base)
    settings.require_valid()
    return settings, theirs


@dataclasses.dataclass(frozen=True, slots=True)
class Early:
    """What of this process's command line is needed before Megatron's parser exists.

    ``device`` is ``auto`` or ``cpu``; ``bug`` is re-created also in training without a check.
    """

    is_checked: bool
    device: str
    bug: str | None
    yaml_cfg: str | None

    @classmethod
    def read(cls, words: Sequence[str]) -> Self:
        """From the words of a command line, whose wrong values are reported later."""
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        CHECK.add(parser, default=False)
        parser.add_argument(FLAGS["device"].name, default=Settings.device)
        parser.add_argument(FLAGS["bug"].name)
        parser.add_argument("--yaml-cfg")
        args, _ = parser.parse_known_args(list(words))
        return cls(args.ttrace, args.ttrace_device, args.ttrace_bug, args.yaml_cfg)


def checking(
    script: str | os.PathLike[str],
    arguments: Sequence[str],
    nproc: int,
    settings: Settings | None = None,
    *options: str,
    command: str = "check",
) -> list[str]:
    """The words of ``ttrace check``, or of a ``command`` with the same options, after ``ttrace``.

    ``settings`` are of the check (``None``: the defaults), ``options`` further ones of the command.
    """
    ours = settings.words() if settings else []
    words = [command, "--nproc-per-node", str(nproc), *ours, *options]
    return [*words, "--", os.fspath(script), *arguments]
