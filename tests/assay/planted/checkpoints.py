# SPDX-License-Identifier: Apache-2.0
"""Faults of saving and loading: what one leaves in a checkpoint, or in the ranks after loading.

A fault is data (:class:`Fault`): a side, a mechanism and the seed that chooses the state. It is put
into Megatron's own functions while they save or load, below everything that a checker wraps:

- *save*: the rank's live state is wrong from the first line of ``save_checkpoint`` that reads it to
  the last, then right again. So every format is covered, and the run that saves is unharmed.
- *load*: the live state becomes wrong at the end of ``load_checkpoint``.
- Mechanisms that describe: what says which part a shard is (its offsets) is wrong when saving and
  when loading. Both cancel out unless the layout changes.

Every rank plants the same fault; what it hits is agreed on by all. ``TTRACE_TEST_TRUTH`` names a
directory where each rank records what it changed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.assay.planted.checkpoint_faults import MECHANISMS, Side
from tests.assay.planted.live import Live
from tests.assay.planted.mistakes import global_rank, wrap

TRUTH = "TTRACE_TEST_TRUTH"
"""Environment variable; set only where a fault is proved, never where it is looked for."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        side: of saving or loading.
        mechanism: a name in :data:`MECHANISMS`.
        seed: chooses the state that is hit, the rank, and by how much.
    """

    side: Side
    mechanism: str
    seed: int

    @property
    def order(self) -> str:
        """For the environment variable ``TTRACE_TEST_PLANTED``."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def of(cls, order: str) -> Fault:
        """The opposite of :attr:`order`."""
        fields = json.loads(order)
        return cls(Side(fields["side"]), fields["mechanism"], fields["seed"])


def plant(order: str) -> None:
    """Make the fault in this process."""
    fault = Fault.of(order)
    kind = MECHANISMS[fault.mechanism]
    live = Live()
    if kind.describes:
        wrap("megatron.training.checkpointing:generate_state_dict", _describing(live, fault))
    elif fault.side is Side.SAVE:
        _plant_saving(live, fault)
    else:
        _plant_loading(live, fault)


def _damage(live: Live, fault: Fault) -> None:
    MECHANISMS[fault.mechanism].damage(live, random.Random(fault.seed))
    if TRUTH in os.environ:
        path = Path(os.environ[TRUTH], f"truth-{global_rank()}.json")
        path.write_text(json.dumps(sorted(set(live.truth))), encoding="utf-8")


def _describing(live: Live, fault: Fault) -> Callable[..., Any]:
    def generate_state_dict(old: Any, *args: Any, **more: Any) -> Any:
        live.described = old(*args, **more)
        _damage(live, fault)
        return live.described

    return generate_state_dict


def _plant_saving(live: Live, fault: Fault) -> None:
    saving = [False]

    def save_checkpoint(old: Any, iteration: Any, *args: Any, **more: Any) -> Any:
        live.chunks, live.optimizer, live.scheduler = args[:3]
        saving[0] = True
        return old(iteration, *args, **more)

    def train_step(old: Any, *args: Any, **more: Any) -> Any:
        if live.optimizer is not None:
            live.remember()
        return old(*args, **more)

    def setup(old: Any, *args: Any, **more: Any) -> Any:
        live.chunks, live.optimizer, live.scheduler = built = old(*args, **more)
        return built

    def get_rng_state(old: Any, *args: Any, **more: Any) -> Any:
        # The first line of save_checkpoint that reads any state.
        if saving[0]:
            _damage(live, fault)
        return old(*args, **more)

    def on_checkpointing_end(old: Any, *args: Any, **more: Any) -> Any:
        saving[0] = False
        while live.undo:
            live.undo.pop()()
        return old(*args, **more)

    wrap("megatron.training.training:setup_model_and_optimizer", setup)
    wrap("megatron.training.training:train_step", train_step)
    wrap("megatron.training.training:save_checkpoint", save_checkpoint)
    wrap("megatron.training.checkpointing:get_rng_state", get_rng_state)
    wrap("megatron.training.ft_integration:on_checkpointing_end", on_checkpointing_end)


def _plant_loading(live: Live, fault: Fault) -> None:
    def load_checkpoint(old: Any, *args: Any, **more: Any) -> Any:
        live.chunks, live.optimizer, live.scheduler = args[:3]
        live.remember()
        return old(*args, **more)

    def on_checkpoint_loaded(old: Any, *args: Any, **more: Any) -> Any:
        # The last line of load_checkpoint that is run on every rank.
        _damage(live, fault)
        live.undo.clear()
        return old(*args, **more)

    wrap("megatron.training.training:load_checkpoint", load_checkpoint)
    wrap("megatron.training.ft_integration:on_checkpoint_loaded", on_checkpoint_loaded)
