# SPDX-License-Identifier: Apache-2.0
"""Gradients that are right in the end: of a scaled loss; added up in the optimizer's step."""

import copy

import pytest

from megatron_ttrace.report.wording import notes_text
from megatron_ttrace.trace.records import Kind, Outcome
from tests.compare.test_by_design import (
    ENTERING,
    FAR,
    GRADIENT,
    LEAVING,
    MLP,
    USED,
    WEIGHT,
    World,
    blind,
    off,
    without,
)
from tests.compare.traces import step_level


@pytest.mark.parametrize(
    ("scales", "outcome"),
    [
        ((0.5, 0.5), Outcome.PASS),
        ((3.0, 3.0), Outcome.PASS),
        ((0.5, 1.0), Outcome.REPLICA_CONFLICT),
        ((-1.0, -1.0), Outcome.DIVERGED),
    ],
)
def test_gradients_with_one_factor(tmp_path, scales, outcome):
    """A job may divide its loss by the number of ranks, and add gradients up."""
    mlp = World(tmp_path, MLP, 2, tp=2)
    gradients = (LEAVING, USED, GRADIENT, ENTERING)
    for tensors, scale in zip(mlp.ranks, scales, strict=True):
        tensors |= {place: mlp.tensors[place] * scale for place in gradients}
    outcomes, noted = mlp.outcomes()
    assert outcomes[ENTERING] is outcome
    if outcome is Outcome.PASS:
        assert {outcomes[place] for place in gradients} == {outcome}
        assert "the job scales its loss" in notes_text(noted[ENTERING].notes)
    assert mlp.outcomes(isolated=True)[0][ENTERING].is_failure
    for change in (off(WEIGHT, 1), off(USED, 0), without(WEIGHT, FAR)):
        changed = copy.deepcopy(mlp)
        change(changed)
        assert changed.outcomes()[0][ENTERING].is_failure


@pytest.mark.parametrize(("moved", "fails"), [(0.002, False), (0.01, True)])
def test_a_factor_that_main_gradients_could_have_too(tmp_path, moved, fails):
    """A loss that is divided by one token too few, where rounding hides that in a main gradient."""
    mlp = World(tmp_path, MLP, 2, tp=2)
    mlp.moved[FAR] = moved
    for tensors in mlp.ranks:
        tensors |= {
            place: mlp.tensors[place] * 1.03 for place in (LEAVING, USED, GRADIENT, ENTERING)
        }
    assert mlp.outcomes()[0][ENTERING].is_failure == fails


MOMENT, UPDATE = (step_level(kind, WEIGHT[2]) for kind in (Kind.EXP_AVG, Kind.PARAM_DELTA))
GRAD_NORM = step_level(Kind.GRAD_NORM, "grad_norm")


@pytest.mark.parametrize(
    ("change", "isolated", "excused"),
    [
        (lambda _: None, False, True),
        (lambda _: None, True, False),
        (off(MOMENT, 0), False, False),
        (off(UPDATE, 1), False, False),
        (without(UPDATE), False, False),
        (off(GRAD_NORM, 1), False, False),
        (without(GRAD_NORM), False, False),
        (blind(MOMENT), False, False),
        (lambda world: world.moved.update({MOMENT: 2e-3}), False, False),
    ],
)
def test_a_gradient_that_the_optimizers_step_adds_up(tmp_path, change, isolated, excused):
    """Each rank has a summand until then."""
    world = World(tmp_path, (WEIGHT, MOMENT, UPDATE, GRAD_NORM), 2, tp=2)
    for tensors, weight in zip(world.ranks, (1.6, -0.6), strict=True):
        tensors[WEIGHT] = weight * world.tensors[WEIGHT]
    change(world)
    assert world.outcomes(isolated=isolated)[0][WEIGHT].is_failure != excused
