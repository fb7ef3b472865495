# SPDX-License-Identifier: Apache-2.0
"""The known bugs, read from ``patches/bugs/*.toml``. docs/bugs/README.md describes the format."""

from __future__ import annotations

import dataclasses
import re
import shlex
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ttrace.errors import TTraceError
from megatron_ttrace.resources import patches_dir
from megatron_ttrace.trace.findings import Cause
from megatron_ttrace.trace.records import Direction, Kind, Outcome

_ID = re.compile(r"\d\d[a-z]?")
_ABBREVIATIONS = {
    "--tensor-model-parallel-size": "TP",
    "--pipeline-model-parallel-size": "PP",
    "--context-parallel-size": "CP",
    "--expert-model-parallel-size": "EP",
    "--sequence-parallel": "SP",
    "--use-distributed-optimizer": "ZeRO",
    "--fp8-format": "FP8",
    "--num-experts": "experts",
    "--recompute-granularity": "recompute",
    "--tp-comm-overlap": "overlap",
}


@dataclasses.dataclass(frozen=True, slots=True)
class SourcePatch:
    """A change to the bodies of functions: ``fragment`` occurs in the module exactly once."""

    module: str
    fragment: str
    replacement: str


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """A job in which the bug shows: ranks, and arguments on top of the suite's small model.

    ``flags`` are ``--ttrace-*`` flags that the check needs besides. ``healthy`` are arguments for
    the healthy run only, where a Megatron without the bug refuses the layout as it is. ``data`` is
    ``mock``, or ``uneven``: sequences differ much in what a loss mask leaves. ``models`` limits the
    layout to some of the suite's models, where another one cannot run it.
    """

    nproc: int
    arguments: tuple[str, ...]
    healthy: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    data: str = "mock"
    models: tuple[str, ...] = ("gpt", "llama")

    @property
    def short(self) -> str:
        """In the field's abbreviations (``TP 2 SP``); arguments that have none are left out."""
        words: list[str] = []
        taken = False
        for word in self.arguments:
            if word.startswith("--"):
                taken = word in _ABBREVIATIONS
                if taken:
                    words.append(_ABBREVIATIONS[word])
            elif taken:
                words.append(word)
        return " ".join(words) or ("DP" if self.nproc > 1 else "one rank")


@dataclasses.dataclass(frozen=True, slots=True)
class Expected:
    """What the report must say.

    Attributes:
        module: pattern (fnmatch) of the canonical name; some culprit must match it.
        kind: of that culprit's tensor.
        direction: in which it went wrong.
        verdicts: any of these.
        index: number of that tensor, when only this one may be named.
        only: pattern that the names of all culprits must match; empty: that of ``module``.
            ``{last}`` in it is the number of the model's last layer.
        cause: what must be found out about it, or ``None`` where nothing must.
        axes: of the mesh that the finding must speak of.
    """

    module: str
    kind: Kind
    direction: Direction
    verdicts: tuple[Outcome, ...]
    index: int | None = None
    only: str = ""
    cause: Cause | None = None
    axes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Bug:
    """One known bug. ``axis`` names what it takes to trigger it, in words."""

    id: str
    name: str
    title: str
    upstream: tuple[str, ...]
    confidence: str
    axis: str
    layouts: tuple[Layout, ...]
    patches: tuple[SourcePatch, ...]
    expected: Expected


def folder() -> Path:
    """Where the bugs are described."""
    return patches_dir() / "bugs"


def load_catalogue() -> list[Bug]:
    """All known bugs, ordered by id.

    Raises:
        TTraceError: when a description is damaged, with its file.
    """
    bugs = [read_bug(path) for path in sorted(folder().glob("*.toml"))]
    ids = [bug.id for bug in bugs]
    if len(set(ids)) != len(ids):
        raise TTraceError(f"{folder()}: two bugs have the same id")
    return bugs


def find(bugs: Sequence[Bug], wanted: str) -> Bug:
    """The bug with an id.

    Raises:
        TTraceError: when there is none.
    """
    for bug in bugs:
        if wanted in (bug.id, bug.name, f"{bug.id}-{bug.name}"):
            return bug
    known = ", ".join(bug.id for bug in bugs)
    raise TTraceError(f"--ttrace-bug {wanted}: unknown, known are {known}; see ttrace bugs list")


def read_bug(path: Path) -> Bug:
    """Read one description.

    Raises:
        TTraceError: when it is damaged.
    """
    try:
        with path.open("rb") as file:
            return _bug(tomllib.load(file), path)
    except (KeyError, ValueError, TypeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise TTraceError(f"{path}: not a valid description of a bug ({reason})") from error


def _bug(data: dict[str, Any], path: Path) -> Bug:
    number, _, name = path.stem.partition("-")
    if not _ID.fullmatch(number) or not name:
        raise ValueError("the file's name should be NN-name.toml")
    expected = dict(data.pop("expected"))
    return Bug(
        id=number,
        name=name,
        title=data.pop("title"),
        upstream=tuple(data.pop("upstream")),
        confidence=data.pop("confidence"),
        axis=data.pop("axis"),
        layouts=tuple(_layout(dict(layout)) for layout in data.pop("layout")),
        patches=tuple(SourcePatch(**patch) for patch in data.pop("patch")),
        expected=Expected(
            module=expected.pop("module"),
            kind=Kind(expected.pop("kind")),
            direction=Direction(expected.pop("direction")),
            verdicts=tuple(Outcome(word) for word in expected.pop("verdicts")),
            cause=Cause(expected.pop("cause")) if "cause" in expected else None,
            axes=tuple(expected.pop("axes", ())),
            **expected,
        ),
        **data,
    )


def _layout(data: dict[str, Any]) -> Layout:
    if data.get("data", "mock") not in ("mock", "uneven"):
        raise ValueError(f"data is {data['data']!r}, neither 'mock' nor 'uneven'")
    return Layout(
        nproc=data.pop("nproc"),
        arguments=tuple(shlex.split(data.pop("arguments"))),
        healthy=tuple(shlex.split(data.pop("healthy", ""))),
        flags=tuple(shlex.split(data.pop("flags", ""))),
        models=tuple(data.pop("models", Layout.__dataclass_fields__["models"].default)),
        **data,
    )
