# SPDX-License-Identifier: Apache-2.0
"""The known bugs, read from ``patches/bugs/*.toml``, whose fields are those of the records here."""

import dataclasses
import re
import shlex
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ttrace.evaluation.suites import Data
from megatron_ttrace.jobs.resources import patches_dir
from megatron_ttrace.trace import codec
from megatron_ttrace.trace.errors import TTraceError, reported
from megatron_ttrace.trace.findings import Cause
from megatron_ttrace.trace.records import Direction, Kind, Outcome

_FILE = re.compile(r"(\d\d[a-z]?)-(.+)")
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
class BugLayout:
    """A job that shows the bug.

    Attributes:
        arguments: Megatron's, in addition to those of the suite's small model.
        healthy: further arguments of the healthy run, if Megatron without the bug rejects the
            layout.
        flags: ``--ttrace-*`` flags of both runs.
        models: those of the suite's models that can run it.
    """

    nproc: int
    arguments: tuple[str, ...]
    healthy: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    data: Data = Data.MOCK
    models: tuple[str, ...] = ("gpt", "llama")

    @property
    def short(self) -> str:
        """The usual abbreviations (``TP 2 SP``); arguments without one are left out."""
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
        module: pattern (fnmatch) of the canonical name of a culprit.
        verdicts: any of these.
        index: number of that tensor, if only this one may be named.
        only: pattern that the names of all culprits must match; empty: that of ``module``.
            ``{last}`` stands for the number of the model's last layer.
        cause: that the finding must have; ``None`` for any or no finding.
        axes: mesh axes that must be among the finding's.
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
    """One known bug.

    Attributes:
        axis: what triggers it, in words.
        confidence: of the identification: A direct evidence, B unique best match, C one of several.
    """

    id: str
    name: str
    title: str
    upstream: tuple[str, ...]
    confidence: str
    axis: str
    layouts: tuple[BugLayout, ...]
    patches: tuple[SourcePatch, ...]
    expected: Expected


def folder() -> Path:
    """Where the descriptions are."""
    return patches_dir() / "bugs"


def load_catalogue() -> list[Bug]:
    """All known bugs, ordered by id.

    Raises ``TTraceError`` when a description is damaged, with its file.
    """
    bugs = [read_bug(path) for path in sorted(folder().glob("*.toml"))]
    if len({bug.id for bug in bugs}) != len(bugs):
        raise TTraceError(f"{folder()}: two bugs have the same id")
    return bugs


def find(bugs: Sequence[Bug], wanted: str) -> Bug:
    """The bug with an id or a name.

    Raises ``TTraceError`` when there is none.
    """
    for bug in bugs:
        if wanted in (bug.id, bug.name, f"{bug.id}-{bug.name}"):
            return bug
    known = ", ".join(bug.id for bug in bugs)
    raise TTraceError(f"--ttrace-bug {wanted}: unknown; known: {known} (ttrace eval bugs list)")


def read_bug(path: Path) -> Bug:
    """Read one description.

    Raises ``TTraceError`` when it is damaged.
    """
    what = f"{path}: not a valid description of a bug"
    with reported(what, KeyError, ValueError, TypeError, AttributeError):
        match = _FILE.fullmatch(path.stem)
        if not match:
            raise ValueError("the file's name should be NN-name.toml")
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        data |= {
            "id": match[1],
            "name": match[2],
            "layouts": [_layout(layout) for layout in data.pop("layout")],
            "patches": [_known(SourcePatch, patch) for patch in data.pop("patch")],
            "expected": _known(Expected, data["expected"]),
        }
        return codec.decode(Bug, _known(Bug, data))


def _layout(data: dict[str, Any]) -> dict[str, Any]:
    for key in ("arguments", "healthy", "flags"):
        if key in data:
            data[key] = shlex.split(data[key])
    return _known(BugLayout, data)


def _known(record: type, data: dict[str, Any]) -> dict[str, Any]:
    """Reject misspelt keys, which the codec would ignore."""
    known = {field.name for field in dataclasses.fields(record)}
    if unknown := data.keys() - known:
        raise ValueError(f"unknown key {min(unknown)!r}")
    return data
