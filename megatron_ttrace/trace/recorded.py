# SPDX-License-Identifier: Apache-2.0
"""What a recorded training run keeps on disk: its state at some points, and each of its steps.

``ttrace resume`` trains a job with this recorded and compares two such runs (``saved/resume.py``).
Layout of the folder ``states`` of a run's directory::

    saved/, read/, loaded/, end/   state of all ranks (``trace/store.py``), at these points
    rank-00000.json                the rest of what a rank recorded: a :class:`RankRecord`
"""

import dataclasses
import json
from enum import StrEnum
from pathlib import Path
from typing import Self

from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.trace import codec, owned
from megatron_ttrace.trace.codec import Count, Record
from megatron_ttrace.trace.errors import TTraceError, reported
from megatron_ttrace.trace.states import Bucketed

FOLDER = "states"
"""Of a run's directory."""


class Point(StrEnum):
    """When a state was recorded."""

    READ = "read"
    """What Megatron read from the checkpoint, in a restart, before it loaded any of it: all of the
    state, random states alone, or nothing (``mcore/checkpoints/read.py``)."""
    LOADED = "loaded"
    """After the model was built and the checkpoint loaded, before the first step."""
    SAVED = "saved"
    """When Megatron begins to save."""
    END = "end"
    """After the last step."""


@dataclasses.dataclass(frozen=True, slots=True)
class Order(Record):
    """What a run is asked to do; its file is the value of ``--ttrace-overrides``.

    Attributes:
        steps: after which the run ends.
        save_after: steps after which the one checkpoint is saved; 0 to save none.
        seed: of the perturbation of every step (``run/perturb.py``); 0 for none.
    """

    steps: Count
    save_after: Count = 0
    seed: Count = 0

    @property
    def is_restart(self) -> bool:
        """Whether the run starts from another one's checkpoint, and is not perturbed."""
        return not self.save_after and not self.seed

    def write(self, path: Path) -> None:
        """Write it."""
        owned.write(path, [json.dumps(self.to_json())])

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read it. Raises ``TTraceError``."""
        return _read(cls, path)


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One training step.

    Attributes:
        samples: a digest of each sample, by microbatch; empty on a rank that reads no data.
        numbers: with which it began (``capture/state.py: held_numbers``).
        losses: what is logged; empty on a rank that computes no loss.
        changed: places of the user's changes that ran while samples were read until then.
    """

    iteration: Count
    samples: tuple[tuple[str, ...], ...]
    numbers: dict[str, float]
    losses: dict[str, float]
    grad_norm: float | None
    changed: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Code:
    """Places of the code that saves something, and of the code that loads it."""

    saves: str
    loads: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord(Record):
    """What one rank recorded besides tensors.

    Attributes:
        omitted: options of the job because of which something is neither saved nor loaded.
        is_exact: whether the same step gives the same bits again.
        samples_by_layout: whether the order of samples depends on the layout by design.
        numbers: of the training state, at each point.
        random: digests of random states at each point, by name.
        described: by module, the code that describes its parameters' shards.
        stored: by parameter or buffer, its name in a checkpoint, if it is stored as it is.
        buckets: where a checkpoint may have the optimizer's state of this rank's parameters.
        places: of other state: by what it is (``trace/resumed.py``), or by the first word of a
            number's name.
        changed: places of the user's changes that ran while the checkpoint was saved or loaded.
    """

    mesh: Mesh
    omitted: tuple[str, ...]
    is_exact: bool
    dropout: bool
    samples_by_layout: bool
    numbers: dict[str, dict[str, float]]
    random: dict[str, dict[str, str]]
    steps: tuple[Step, ...]
    described: dict[str, str]
    stored: dict[str, str]
    buckets: tuple[Bucketed, ...]
    places: dict[str, Code]
    changed: tuple[str, ...] = ()

    def write(self, folder: Path) -> None:
        """Write it beside the tensors."""
        owned.write(folder / f"rank-{self.mesh.rank:05d}.json", [json.dumps(self.to_json())])


def read_ranks(folder: Path) -> tuple[RankRecord, ...]:
    """The records of all ranks, by rank. Raises ``TTraceError``."""
    records = [_read(RankRecord, path) for path in sorted(folder.glob("rank-*.json"))]
    ranks = [record.mesh.rank for record in records]
    if not records or ranks != list(range(records[0].mesh.world_size)):
        raise TTraceError(f"{folder} lacks the records of some ranks: run the command again")
    return tuple(records)


def _read[R: Record](kind: type[R], path: Path) -> R:
    with reported(f"{path} cannot be read", OSError, ValueError, advice="run the command again"):
        return kind.from_json(codec.parse(codec.read(path)))
