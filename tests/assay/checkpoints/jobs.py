# SPDX-License-Identifier: Apache-2.0
"""The jobs of ``jobs.toml``: what saves a checkpoint, and the layouts it is loaded in."""

from __future__ import annotations

import dataclasses
import functools
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_ttrace.evaluation.matrix import configurations as matrix

FILE = Path(__file__).with_name("jobs.toml")
SAVED, LAST = 2, 4
"""The iteration that is saved, and the last one."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Number of ranks and the words of the layout."""

    nproc: int
    words: str

    @classmethod
    def of(cls, text: str) -> Layout:
        """From ``"2 tp2 sp"``."""
        nproc, _, words = text.partition(" ")
        return cls(int(nproc), words)

    def __str__(self) -> str:
        return f"{self.nproc} {self.words}".strip()

    @property
    def flags(self) -> tuple[str, ...]:
        """Megatron's arguments."""
        return arguments(self.words)

    def changed(self, before: Layout) -> tuple[str, ...]:
        """What to add to a command in another layout: sizes that are gone become 1."""
        if self.words == before.words:
            return ()
        gone = [flag for flag in before.flags if flag.startswith("--") and flag not in self.flags]
        ones = [word for flag in gone if flag != "--sequence-parallel" for word in (flag, "1")]
        return (*ones, *self.flags)


@dataclasses.dataclass(frozen=True)
class Job:
    """What saves.

    Attributes:
        name: of the row.
        model, dtype: of the matrix.
        layout: in which it saves.
        more: words that hold when saving and when loading: format, optimizer, numbers of layers.
        into: the layouts to load in.
        faults: whether faults are planted in it.
    """

    name: str
    model: str
    layout: Layout
    into: tuple[Layout, ...]
    dtype: str = "fp32"
    more: str = ""
    faults: bool = False

    @property
    def base(self) -> tuple[str, ...]:
        """Megatron's arguments in every layout."""
        words = f"{self.more} {matrix.DTYPES[self.dtype]}"
        model = matrix.arguments_of(self.model, "")
        return (*model, "--mock-data", *_table()["common"].split(), *arguments(words))

    @property
    def words(self) -> frozenset[str]:
        """What mechanisms may need (``Mechanism.needs``)."""
        words = {*self.more.split(), *self.layout.words.split()}
        layers = 4 if {"deep", "vpp2"} & words else 2
        found = {"decay", *({self.dtype} - {"fp32"}), *({"dropout"} & words)}
        if self.dtype != "fp32":
            found.add("main")
        if "swiglu" in matrix.MODELS[self.model]:
            found.add("gated")
        if "--num-experts" in matrix.MODELS[self.model]:
            found.add("experts")
        if "--moe-router-enable-expert-bias" in matrix.MODELS[self.model]:
            found.add("bias")
        found |= {re.sub(r"\d", "", word) for word in words if re.fullmatch(r"(tp|ep|pp)\d", word)}
        if layers > 2 or "pp" not in found:
            found.add("deep")
        if not {"torch", "fsdp"} & words:
            found.add("torch_dist")
        return frozenset(found)


def arguments(words: str) -> tuple[str, ...]:
    """Megatron's arguments of short words."""
    flags = {**matrix.FLAGS, **_table()["flags"]}
    return tuple(" ".join(flags.get(word, word) for word in words.split()).split())


@functools.cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return table


def jobs() -> dict[str, Job]:
    """All of them, by name."""
    return {name: _job(name, dict(row)) for name, row in _table()["jobs"].items()}


def _job(name: str, row: dict[str, Any]) -> Job:
    layout, into = Layout.of(row.pop("layout")), tuple(map(Layout.of, row.pop("into")))
    return Job(name=name, layout=layout, into=into, **row)


def pairs() -> Iterator[tuple[Job, Layout]]:
    """All (save in X, load in Y)."""
    for job in jobs().values():
        for layout in job.into:
            yield job, layout
