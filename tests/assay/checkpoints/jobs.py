# SPDX-License-Identifier: Apache-2.0
"""The jobs of ``jobs.toml``, the layouts their checkpoints are loaded in, and samples of faults."""

from __future__ import annotations

import dataclasses
import functools
import random
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_ttrace.evaluation.matrix import configurations as matrix
from tests.assay.planted.checkpoint_faults import MECHANISMS, Mechanism, Side
from tests.assay.planted.checkpoints import Fault

SAVED, LAST = 2, 4
"""The iteration that is saved, and the last one."""
_SEED_BITS = 32
_BY_LAYOUT = {"tp", "ep", "deep", "dropout"}
"""What a job needs in the layout in which the fault is made, or shows."""


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
        id: of the row.
        model, dtype: of the matrix.
        layout: in which it saves.
        more: words that hold when saving and when loading: format, optimizer, numbers of layers.
        into: the layouts to load in.
        faults: whether faults are planted in it.
    """

    id: str
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
        words, model = {*self.more.split(), *self.layout.words.split()}, matrix.MODELS[self.model]
        is_deep = {"deep", "vpp2"} & words
        features = {
            "decay": True,
            self.dtype: True,
            "main": self.dtype != "fp32",
            "dropout": "dropout" in words,
            "gated": "swiglu" in model,
            "experts": "--num-experts" in model,
            "bias": "--moe-router-enable-expert-bias" in model,
            "deep": is_deep or "pp2" not in words,
            "torch_dist": not {"torch", "fsdp"} & words,
        }
        axes = {word[:2] for word in words if re.fullmatch(r"(tp|ep|pp)\d", word)}
        return frozenset({name for name, has in features.items() if has} | axes)


def arguments(words: str) -> tuple[str, ...]:
    """Megatron's arguments of short words."""
    flags = {**matrix.FLAGS, **_table()["flags"]}
    return tuple(" ".join(flags.get(word, word) for word in words.split()).split())


@functools.cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads(
        Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    )
    return table


def jobs() -> dict[str, Job]:
    """All of them, by name."""
    return {name: _job(name, dict(row)) for name, row in _table()["jobs"].items()}


def _job(name: str, row: dict[str, Any]) -> Job:
    layout, into = Layout.of(row.pop("layout")), tuple(map(Layout.of, row.pop("into")))
    return Job(id=name, layout=layout, into=into, **row)


@dataclasses.dataclass(frozen=True)
class Planted:
    """A fault in a job, and the layout in which it is looked for.

    Attributes:
        fault: what is wrong.
        job: what saves.
        into: what loads; the job is restarted in its own layout in any case.
    """

    fault: Fault
    job: Job
    into: Layout

    @property
    def id(self) -> str:
        """Unique in a sample."""
        into = f"-{self.into}".replace(" ", "-")
        return f"{self.fault.side}-{self.fault.mechanism}-{self.job.id}{into}-{self.fault.seed}"


def sample(seed: int) -> Iterator[Planted]:
    """Faults without end: rounds over all mechanisms in random order.

    Side, job, layout and state are drawn uniformly from those that are possible.
    """
    chance = random.Random(seed)
    rows = [job for job in jobs().values() if job.faults]
    while True:
        for name in chance.sample(sorted(MECHANISMS), len(MECHANISMS)):
            kind = MECHANISMS[name]
            side = chance.choice(kind.sides)
            job = chance.choice([job for job in rows if kind.needs <= job.words])
            into = chance.choice(_layouts(kind, side, job))
            yield Planted(Fault(side, name, chance.getrandbits(_SEED_BITS)), job, into)


def _layouts(kind: Mechanism, side: Side, job: Job) -> list[Layout]:
    """Those in which the fault can be seen."""
    others = [layout for layout in job.into if layout != job.layout]
    if kind.describes:
        return others or [job.layout]
    if (side is Side.LOAD and kind.needs & _BY_LAYOUT) or "dropout" in kind.needs:
        return [job.layout]
    return [job.layout, *others]
