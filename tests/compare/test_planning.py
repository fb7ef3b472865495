# SPDX-License-Identifier: Apache-2.0
"""What a captured tensor is compared with, from names and shapes alone."""

import dataclasses

import pytest
import torch

from megatron_ttrace.compare import planning
from megatron_ttrace.compare.planning import Planner, RankLayout
from megatron_ttrace.trace.records import ROOT, Kind, TraceKey
from tests.compare.traces import reference_of
from tests.placement.meshes import mesh_of

KEY = TraceKey(1, 0, Kind.OUTPUT, "a", 0)
GRAD = TraceKey(1, 0, Kind.GRAD_INPUT, "a", 0)
LAYOUT = RankLayout(mesh_of(1, 2, tp=2), 8, 3.0, frozenset({"a", "x"}))


@pytest.fixture
def reference(tmp_path):
    places = [(0, kind, "a", 0) for kind in (Kind.OUTPUT, Kind.GRAD_INPUT)]
    return reference_of(tmp_path, dict.fromkeys(places, torch.ones(8, 1, 6)))


def test_what_cannot_be_followed_is_not_planned(reference):
    """Experts behind a dispatcher that carries no other data."""
    layout = RankLayout(mesh_of(0, 2, ep=2), 8, 1.0, dispatcher="flex")
    key = dataclasses.replace(KEY, name="decoder.layers.0.mlp.experts")
    assert Planner(reference, 1, layout).plan(key, (4,)) == []


def test_each_shape_is_planned_once(reference, monkeypatch):
    """Most tensors of a model have few shapes."""
    calls = []
    plain = planning.infer_activation
    monkeypatch.setattr(
        planning, "infer_activation", lambda *a, **k: calls.append(a) or plain(*a, **k)
    )
    planner = Planner(reference, 1, LAYOUT)
    assert planner.plan(KEY, (4, 1, 6)) == planner.plan(KEY, (4, 1, 6))
    planner.plan(GRAD, (4, 1, 6))
    assert len(calls) == 1


def test_samples_of_another_length(tmp_path):
    """Fine-tuning does not pad them; what the model was given says how long they are."""
    shapes = {(0, Kind.INPUT, ROOT, 0): (1, 12), (0, Kind.OUTPUT, "a", 0): (12, 1, 6)}
    tensors = {place: torch.ones(shape) for place, shape in shapes.items()}
    layout = RankLayout(mesh_of(1, 2, cp=2), 16, 1.0)
    planner = Planner(reference_of(tmp_path, tensors), 1, layout)
    (match,) = planner.plan(KEY, (6, 1, 6))
    assert [box.logical[0] for box in match.boxes] == [3]
    assert planner.positions(0, (6, 1)).tolist() == [3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("name", "axis", "local", "begins"),
    [
        ("slopes", "tp", (3,), 3),
        ("slopes", "tp", (6,), 0),
        ("slopes", "tp", (4,), None),
        ("slopes", "tp", (3, 1), None),
        ("slopes", "ep", (3,), None),
        ("mlp.experts.scale", "ep", (3,), 3),
    ],
)
def test_a_buffer_of_a_ranks_heads_or_experts(tmp_path, name, axis, local, begins):
    """Its shape tells; what fits no division is a finding."""
    place = -1, Kind.BUFFER, name, 1
    reference = reference_of(tmp_path, {place: torch.ones(6)})
    layout = RankLayout(mesh_of(1, 2, **{axis: 2}), 8, 1.0)
    (match,) = Planner(reference, 1, layout).plan(TraceKey(1, *place), local, (local, ()))
    assert ([box.logical[0] for box in match.boxes] or [None]) == [begins]


def test_only_a_known_tensor_is_turned(reference):
    """Nothing tells how a tensor that the reference lacks would lie there."""
    planner = Planner(reference, 1, LAYOUT)
    data = torch.zeros(2, 8, 6)
    assert planner.oriented(KEY, data).shape == (8, 2, 6)
    assert planner.oriented(GRAD, data).shape == (2, 8, 6)
    assert planner.oriented(dataclasses.replace(KEY, name="x"), data).shape == (2, 8, 6)
