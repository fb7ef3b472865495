# SPDX-License-Identifier: Apache-2.0
"""What ranks loaded, against what is stored and what one device loads."""

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_ttrace.capture import state
from megatron_ttrace.compare.writing import WriteSink
from megatron_ttrace.mcore.checkpoints.loading import Part, Source
from megatron_ttrace.mcore.checkpoints.stored import Checkpoint, Format, Stored
from megatron_ttrace.mcore.parameters import ParameterPlace
from megatron_ttrace.placement.mesh import SINGLE
from megatron_ttrace.run.start import loaded
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.meta import ReferenceMeta
from megatron_ttrace.trace.records import LoadedIndex
from megatron_ttrace.trace.states import Bucketed, Item, State
from megatron_ttrace.trace.store import TraceReader, TraceWriter, seal
from tests.capture.stepped import stepped

SOURCE = Source("there", 3, "torch_dist", "")
NAMES = ("weight", "bias")
L = LoadedIndex
WHOLE = (L.ONE_DEVICE, L.ROUNDED, L.MAIN, L.EXP_AVG, L.EXP_AVG_SQ)
NUMBERS = {
    "iteration": 3,
    "opt_param_scheduler.num_steps": 12,
    "opt_param_scheduler.max_lr": 0.5,
    "opt_param_scheduler.lr_decay_style": "linear",
    "param_groups[wd_mult=1].step": 3,
    "param_groups[wd_mult=1].lr": 0.1,
}


@pytest.fixture
def model(monkeypatch):
    """A layer in bfloat16 whose optimizer has main weights and moments; and a buffer."""
    torch.manual_seed(1)
    layer = torch.nn.Linear(3, 2).bfloat16()
    mains = [parameter.data.float() + 1e-5 for parameter in layer.parameters()]
    model = stepped(monkeypatch, layer, mains, loaded)
    for main, parameter in zip(mains, layer.parameters(), strict=True):
        main.copy_(parameter.data.float() + 1e-5)
    names = {parameter: name for name, parameter in layer.named_parameters()}
    names[model.buffers()[0][1]] = "expert_bias"
    monkeypatch.setattr(loaded, "stored_names", lambda chunks: names)
    return model


def stored(data: torch.Tensor) -> Stored:
    """A stored tensor."""
    return Stored(tuple(data.shape), lambda index: data.clone()[index])


def checkpoint_of(model) -> Checkpoint:
    """A checkpoint of a model's state, which it does not share."""
    states = {index: State(s) for index, s in loaded._STATES.items()}
    tensors = {
        Item(states[part.index], part.place.name): stored(part.data.detach().clone())
        for part in state.held_state(model)
    }
    return Checkpoint(Format.TORCH_DIST, tensors, NUMBERS)


def numbers() -> dict:
    """What ranks hold."""
    return {name: value for name, value in NUMBERS.items() if not isinstance(value, str)}


class Sink:
    """Whether each tensor is bitwise what the reference has."""

    def __init__(self, reference):
        self._reference = {(key.name, key.index): reference.data(key) for key in reference}
        self.equal = {}

    def placed(self, place, data, logical_shape, placement):
        """Compare."""
        *_, name, index = place
        self.equal[name, index] = torch.equal(data, self._reference[name, index])


@dataclasses.dataclass
class Start:
    """A start: what Megatron loads on one device, the checkpoint, and what the ranks loaded."""

    model: SimpleNamespace
    directory: Path
    patch: pytest.MonkeyPatch
    source: Source = SOURCE
    checkpoint: Checkpoint | None = None
    numbers: dict = dataclasses.field(default_factory=numbers)
    buckets: dict = dataclasses.field(default_factory=dict)

    def compared(self, load=lambda *_: ""):
        """What every tensor of the candidate is, what the reference has, and the notices."""

        def opened(folder):
            assert folder == Path("there/iter_0000003")
            if self.checkpoint is None:
                raise TTraceError("there: unreadable")
            return self.checkpoint

        self.patch.setattr(loaded, "load_weights", load)
        self.patch.setattr(loaded, "open_checkpoint", opened)
        weights = {parameter: parameter.data.clone() for parameter, _ in self.model.places()}
        device = loaded.InCheckpoint(self.source, self.model, SimpleNamespace(), self.buckets)
        for parameter, weight in weights.items():
            parameter.data.copy_(weight)
        writer = TraceWriter(self.directory, 0)
        device.write(WriteSink(writer, 1))
        writer.close()
        identity = {"start": {"source": dataclasses.asdict(self.source)}}
        meta = ReferenceMeta(loaded=device.unverified, identity=identity)
        seal(self.directory, meta.to_json())
        reference = TraceReader(self.directory)
        sink = Sink(reference)
        loaded.compare(self.model, self.numbers, reference, 1, sink)
        in_reference = {(key.name, LoadedIndex(key.index)) for key in reference}
        return sink.equal, in_reference, list(loaded.notices(reference))


@pytest.fixture
def start(model, tmp_path, monkeypatch) -> Start:
    """Of a checkpoint that can be read."""
    return Start(model, tmp_path, monkeypatch, checkpoint=checkpoint_of(model))


def wrong(equal: dict) -> list:
    """What differs."""
    return [key for key, is_equal in equal.items() if not is_equal]


def test_a_right_start(start):
    """Every state and number is compared; of settings that are words, none."""
    equal, in_reference, notices = start.compared()
    assert set(equal) == in_reference
    assert in_reference == {
        *((name, index) for name in NAMES for index in WHOLE),
        ("expert_bias", L.BUFFER),
        *((name, L.NUMBER) for name, value in NUMBERS.items() if not isinstance(value, str)),
    }
    assert not wrong(equal)
    assert notices == ["started from there/iter_0000003 (torch_dist)"]


def test_what_ranks_lost(start):
    """Each state, and a number, is named; a group that is not like the others is not hidden."""
    part = start.model.optimizer.owned[start.model.chunks[0].weight]
    part.main.copy_(part.main.flatten().roll(1).view_as(part.main))
    part.state["exp_avg_sq"].zero_()
    start.model.buffers()[0][1].zero_()
    start.numbers["param_groups[wd_mult=1]#2.step"] = 0
    equal, *_ = start.compared()
    assert wrong(equal) == [
        ("weight", L.ROUNDED),
        ("weight", L.MAIN),
        ("weight", L.EXP_AVG_SQ),
        ("expert_bias", L.BUFFER),
        ("param_groups[wd_mult=1].step", L.NUMBER),
    ]


def test_main_weights_that_were_saved_wrongly(start):
    """They are what is stored."""
    part = start.model.optimizer.owned[start.model.chunks[0].weight]
    part.main.copy_(part.main.flatten().roll(1).view_as(part.main))
    start.checkpoint = checkpoint_of(start.model)
    equal, *_ = start.compared()
    assert wrong(equal) == [("weight", L.ROUNDED)]


def test_one_device_loads_something_else(start):
    """The ranks have what is stored."""

    def load(source, chunks, weights, args):
        weights[0].add_(1.0)
        return ""

    equal, *_ = start.compared(load)
    assert wrong(equal) == [("weight", L.ONE_DEVICE)]
    assert equal["weight", L.WEIGHT]


def test_every_layout_loads_something_else(start):
    """Also one device."""
    weight = start.model.chunks[0].weight.data
    start.checkpoint.tensors[Item(State.WEIGHT, "weight")] = stored(weight + 1)
    equal, *_ = start.compared()
    assert wrong(equal) == [("weight", L.WEIGHT), ("weight", L.ROUNDED)]
    assert equal["weight", L.ONE_DEVICE]


def test_lost_state_is_missing(start):
    """The reference has what no rank has, whatever its own optimizer got."""
    part = start.model.optimizer.owned[start.model.chunks[0].weight]
    del part.inner.state[part.key]
    equal, in_reference, _ = start.compared()
    assert in_reference - set(equal) == {("weight", L.EXP_AVG), ("weight", L.EXP_AVG_SQ)}


def test_a_padded_vocabulary(start):
    """More rows are padding, which is not compared; fewer are cut off."""
    start.patch.setattr(loaded, "_VOCABULARY", ("weight",))
    tensors = start.checkpoint.tensors
    for item in [item for item in tensors if item.name == "weight"]:
        data = tensors[item].read()
        rows = data[:1] if item.state is State.MAIN else torch.cat([data, data])
        tensors[item] = stored(rows)
    equal, *_ = start.compared()
    assert not wrong(equal)
    start.model.optimizer.owned[start.model.chunks[0].weight].main[0, 0] += 1
    equal, *_ = start.compared()
    assert ("weight", L.MAIN) in wrong(equal)


@pytest.mark.parametrize(
    ("name", "states", "instead", "index"),
    [
        ("weight", (*State,), {"shape": (3, 2)}, L.EXP_AVG),
        ("weight", (State.MAIN,), {"shape": (3, 3)}, L.MAIN),
        ("expert_bias", (State.WEIGHT,), {"shape": (3, 3)}, L.BUFFER),
        ("bias", (*State,), None, L.EXP_AVG),
    ],
    ids=["another shape", "main weights", "a buffer", "not stored by parameter"],
)
def test_what_is_not_verified(start, name, states, instead, index):
    """It is named, and all else is compared."""
    tensors = dict(start.checkpoint.tensors)
    for item in [item for item in tensors if item.name == name and item.state in states]:
        data = tensors.pop(item)
        if instead is not None:
            tensors[item] = dataclasses.replace(data, **instead)
    start.checkpoint = dataclasses.replace(start.checkpoint, tensors=tensors)
    equal, in_reference, notices = start.compared()
    assert not wrong(equal)
    assert (name, index) not in in_reference
    assert {("weight", L.EXP_AVG), ("bias", L.EXP_AVG)} - {(name, index)} <= in_reference
    assert name in notices[-1]


def test_damaged_tensors(start):
    """What cannot be read is not verified, and says why."""

    def damaged(index):
        raise TTraceError("there: file 7 is damaged")

    tensors = start.checkpoint.tensors
    tensors[Item(State.EXP_AVG, "bias")] = Stored((2,), damaged)
    equal, in_reference, notices = start.compared()
    assert not wrong(equal)
    assert ("bias", L.EXP_AVG) not in in_reference
    assert any("file 7" in notice for notice in notices)


def test_a_model_without_names(start):
    """Whatever it raises, weights are compared with one device's."""

    def fails(chunks):
        raise KeyError("names")

    start.patch.setattr(loaded, "stored_names", fails)
    equal, in_reference, notices = start.compared()
    assert not wrong(equal)
    assert ("weight", L.ONE_DEVICE) in in_reference
    assert any("names" in notice for notice in notices)


def test_what_the_user_did_not_load(start):
    """It is named, and not compared."""
    start.source = dataclasses.replace(SOURCE, left=tuple((part, "--finetune") for part in Part))
    part = start.model.optimizer.owned[start.model.chunks[0].weight]
    del part.inner.state[part.key]
    start.numbers |= {"iteration": 0, "param_groups[wd_mult=1].step": 0}
    equal, in_reference, (notice,) = start.compared()
    assert in_reference == {
        *((name, index) for name in NAMES for index in (L.ONE_DEVICE, L.ROUNDED)),
        ("expert_bias", L.BUFFER),
    }
    assert not wrong(equal)
    assert notice.count("--finetune") == 1


def test_a_schedule_of_the_users_own(start):
    """Settings and what follows from them may differ, steps may not."""
    start.source = dataclasses.replace(SOURCE, left=((Part.SCHEDULE, "--override"),))
    start.numbers |= {"opt_param_scheduler.max_lr": 7.0, "param_groups[wd_mult=1].lr": 7.0}
    start.numbers["opt_param_scheduler.num_steps"] = 0
    equal, *_ = start.compared()
    assert wrong(equal) == [("opt_param_scheduler.num_steps", L.NUMBER)]


def test_buckets(start):
    """Two ranks' halves of a weight are put together."""
    moment = start.model.optimizer.owned[start.model.chunks[0].weight].state["exp_avg"]
    tensors = dict(start.checkpoint.tensors)
    del tensors[Item(State.EXP_AVG, "weight")]
    halves = [ParameterPlace("weight", (2, 3), ()).flat(*at) for at in ((0, 3), (3, 6))]
    start.buckets = {
        "weight": [
            Bucketed("weight", f"chained_{rank}.bucket", 2, (3,), (2, 3), place.boxes(SINGLE))
            for rank, place in enumerate(halves)
        ]
    }
    unread = {
        f"chained_{rank}.bucket.exp_avg": stored(torch.cat([torch.ones(2), half, torch.ones(1)]))
        for rank, half in enumerate(moment.clone().flatten().split(3))
    }
    start.checkpoint = dataclasses.replace(start.checkpoint, tensors=tensors, unread=unread)
    equal, *_ = start.compared()
    assert equal["weight", L.EXP_AVG]
    moment[1, 0] += 1
    equal, *_ = start.compared()
    assert wrong(equal) == [("weight", L.EXP_AVG)]


@pytest.mark.parametrize("refuses", [True, False])
def test_what_cannot_be_read(start, refuses):
    """Not the checkpoint, and on one device nothing, or all but a weight: ranks must agree."""
    start.checkpoint = None

    def load(source, chunks, weights, args):
        weights[1].fill_(math.nan)
        return "Megatron: no" if refuses else ""

    equal, in_reference, notices = start.compared(load)
    weight = L.AGREED if refuses else L.ONE_DEVICE
    assert set(equal) == in_reference
    assert in_reference == {
        *(("weight", index) for index in (weight, L.ROUNDED)),
        *(("bias", index) for index in (L.AGREED, L.ROUNDED)),
    }
    assert not wrong(equal)
    assert any(("Megatron: no" if refuses else "bias") in notice for notice in notices)
    assert [("there: unreadable" in notice) for notice in notices] == [False, True, True]
