# SPDX-License-Identifier: Apache-2.0
"""Which faults are planted: a sample that a seed chooses, and nothing else."""

import dataclasses
import random
from collections.abc import Iterator

from tests.assay.checkpoints.jobs import Job, Layout, jobs
from tests.assay.planted.checkpoint_faults import MECHANISMS, Mechanism, Side
from tests.assay.planted.checkpoints import Fault

_SEED_BITS = 32
_BY_LAYOUT = {"tp", "ep", "deep", "dropout"}
"""What a job needs in the layout in which the fault is made, or shows."""


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
    def name(self) -> str:
        """Unique in a sample."""
        into = f"-{self.into}".replace(" ", "-")
        return f"{self.fault.side}-{self.fault.mechanism}-{self.job.name}{into}-{self.fault.seed}"


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
