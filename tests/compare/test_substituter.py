# SPDX-License-Identifier: Apache-2.0
"""What is handed back in a captured tensor's place."""

import pytest
import torch

from megatron_ttrace.compare.planning import Planner, RankLayout
from megatron_ttrace.compare.substituter import Substituter, makers_of
from megatron_ttrace.trace.records import Kind, TraceKey
from tests.compare.traces import reference_of
from tests.placement.meshes import mesh_of

OUT = (0, Kind.OUTPUT, "a", 0)
KEY = TraceKey(1, *OUT)
VALUES = torch.arange(48.0).view(8, 1, 6) + 1


@pytest.fixture
def reference(tmp_path):
    return reference_of(tmp_path, {OUT: VALUES})


def substituter(reference, perturb=None):
    """Of the second of two tensor-parallel ranks."""
    planner = Planner(reference, 1, RankLayout(mesh_of(1, 2, tp=2), 8, 1.0))
    return Substituter(reference, planner, perturb)


def test_a_replay_disturbs_what_it_hands_back(reference):
    """By what its function for that returns, given the key."""
    half = VALUES.chunk(2)[1]
    told = []
    disturbed = substituter(reference, lambda key, data: told.append(key) or data * 2)
    assert torch.equal(disturbed.instead(KEY, half), half * 2)
    assert told == [KEY]


ENTERS, LEFT = Kind.GRAD_INPUT, Kind.GRAD_OUTPUT


@pytest.mark.parametrize(
    ("given", "makers"),
    [
        # The gradient was made by the module that the tensor entered, not by the one it left.
        ([(LEFT, "a"), (ENTERS, "b")], [1]),
        # Of nested modules that it entered, by the innermost.
        ([(ENTERS, "b"), (ENTERS, "b.c")], [1]),
        # A module that hands on what it is given made nothing.
        ([(ENTERS, "drop"), (LEFT, "drop"), (ENTERS, "b")], [2]),
        # Two consumers made it together.
        ([(ENTERS, "b"), (ENTERS, "c")], [0, 1]),
        # Nobody is known to have made it.
        ([(LEFT, "a"), (LEFT, "a.b")], [0, 1]),
        # A name that only begins alike is another module.
        ([(ENTERS, "b"), (ENTERS, "bc")], [0, 1]),
    ],
)
def test_makers_of_a_gradient(given, makers):
    """Those are compared with what they made; the others get the reference's values first."""
    keys = [TraceKey(1, 0, kind, module, 0) for kind, module in given]
    assert makers_of(keys) == [keys[number] for number in makers]
