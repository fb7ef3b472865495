# SPDX-License-Identifier: Apache-2.0
"""Culprits among modules: inside or around each other, or with the same input; isolated ones."""

import dataclasses
import re

import pytest

from megatron_ttrace.trace.counted import Statistic
from megatron_ttrace.trace.records import Direction, Kind, Outcome, RoutingIndex
from tests.diagnose.judged_by_hand import localise, verdict
from tests.diagnose.test_culprits import failing, found


@pytest.mark.parametrize(
    ("entering", "leaving", "named"),
    [
        (1.2, 300.0, "mlp.experts"),
        (100.0, 300.0, "mlp"),
        (1.2, 20.0, "mlp"),
        (0.5, 300.0, "mlp.experts"),
    ],
)
def test_the_largest_jump_within_a_container(entering, leaving, named):
    """A module inside fails by many times more than what enters it, and than the container."""
    verdicts = failing(
        *(("mlp", Kind.INPUT, 0.1), ("mlp.experts", Kind.INPUT, entering)),
        *(("mlp.experts", Kind.OUTPUT, leaving), ("mlp", Kind.OUTPUT, 30.0)),
    )
    (culprit,) = localise(verdicts)
    assert culprit.name == named
    assert ("largest jump" in culprit.reason) == (named != "mlp" and entering > 1)


@pytest.mark.parametrize("isolated", [False, True])
@pytest.mark.parametrize(("error", "named"), [(3.0, ["pooler"]), (4.0, ["head.dense", "pooler"])])
def test_modules_that_share_a_gradient(isolated: bool, error: float, named: list[str]) -> None:
    """They are one culprit: the one with modules inside, around which it has code of its own."""
    verdicts = failing(
        *((name, Kind.GRAD_OUTPUT, 0.1) for name in ("head.dense", "pooler", "pooler.dense")),
        *(("pooler.dense", Kind.GRAD_INPUT, 0.1), ("head.dense", Kind.GRAD_INPUT, 3.0)),
        ("pooler", Kind.GRAD_INPUT, error),
    )
    culprits = localise(verdicts, isolated=isolated)
    assert [culprit.name for culprit in culprits] == named
    is_shared = "; shared with head.dense, which may be wrong instead" in culprits[0].reason
    assert is_shared is (len(named) == 1)


def parameters(absent, outcome):
    """Parameters of a small model, of which those that contain a word are absent."""
    names = [
        "embedding.weight",
        *(
            f"decoder.layers.{layer}.{leaf}"
            for layer in range(3)
            for leaf in ("norm.weight", "mlp.fc1.weight", "mlp.fc1.bias", "mlp.fc2.weight")
        ),
    ]
    return [
        verdict(name, Kind.PARAM, outcome if absent in name else Outcome.PASS, index=index)
        for index in (0, 1)
        for name in names
    ]


@pytest.mark.parametrize("outcome", [Outcome.MISSING, Outcome.EXTRA])
@pytest.mark.parametrize(
    ("absent", "named"),
    [
        ("layers.1", ["decoder.layers.1"]),
        ("layers.1.mlp", ["decoder.layers.1.mlp"]),
        ("fc1", [f"decoder.layers.{layer}.mlp.fc1" for layer in range(3)]),
        ("layers", ["decoder"]),
        ("embedding", ["embedding"]),
    ],
)
def test_a_module_that_is_absent_as_a_whole(outcome, absent, named):
    """It is reported once, and not by each module in it."""
    culprits = localise(parameters(absent, outcome))
    assert [culprit.name for culprit in culprits] == named


INDEXER = "attention.indexer"


def indexed(*, around=0.1, again=300.0):
    """Gradients in two layers, of a model, an attention and what it computes with."""
    margins = {
        "model": 0.1,
        "decoder.layers.1.attention": around,
        f"decoder.layers.1.{INDEXER}.norm": 300.0,
        f"decoder.layers.1.{INDEXER}.query": 300.0,
        "decoder.layers.0.attention": 0.9,
        f"decoder.layers.0.{INDEXER}.norm": again,
    }
    return failing(*((name, Kind.GRAD_OUTPUT, margin) for name, margin in margins.items()))


@pytest.mark.parametrize(
    ("verdicts", "named"),
    [
        # Each module lacks elements of its own, where no rank has them.
        (
            parameters("layers.1.mlp", Outcome.UNCOVERED),
            [f"decoder.layers.1.mlp.fc{n}" for n in (1, 2)],
        ),
        # A module is not inside its other runs, whatever they have in error.
        (
            failing(
                *(("mlp", Kind.INPUT, 0.1), ("mlp", Kind.OUTPUT, 30.0)),
                *(("mlp#1", Kind.INPUT, 1.2), ("mlp#1", Kind.OUTPUT, 300.0)),
            ),
            ["mlp"],
        ),
        # A gradient is made by what uses the output: by the module around it whose own output
        # gradients pass, in each layer.
        (indexed(), [f"decoder.layers.{n}.attention" for n in (1, 0)]),
        # An earlier one surfaces again, the module's own fails, or the model's loss was wrong.
        (indexed(again=3.0), ["decoder.layers.1.attention"]),
        (indexed(around=40.0)[1:], ["decoder.layers.1.attention"]),
        ([*failing(("output_layer", Kind.GRAD_OUTPUT, 9.0)), *indexed()], ["output_layer"]),
        # The run of the module around it whose gradient is wrong, and not the first.
        (
            failing(
                ("decoder", Kind.GRAD_OUTPUT, 0.1),
                *((f"decoder.mtp{at}#1", Kind.GRAD_OUTPUT, 50.0) for at in ("", ".linear")),
                *((f"decoder.mtp{at}", Kind.GRAD_OUTPUT, 0.1) for at in ("", ".linear")),
            ),
            ["decoder"],
        ),
    ],
)
def test_where_it_begins(verdicts, named):
    """The modules that are named."""
    assert found(verdicts) == named


def test_the_first_gradient_inside_a_module_is_named():
    """In the reason."""
    assert f"{INDEXER}.norm" in localise(indexed())[0].reason


def miscounted(name, index):
    """A parameter of which the optimizer has elements twice, or the norm."""
    return dataclasses.replace(verdict(name, Kind.COUNTED, Outcome.DIVERGED), index=index)


@pytest.mark.parametrize(
    ("statistic", "name", "kinds"),
    [
        (Statistic.STEPPED, "mlp.weight", [Kind.COUNTED]),
        (Statistic.GRAD_NORM, "mlp.weight", [Kind.MAIN_GRAD]),
        (Statistic.STEPPED, "other.weight", [Kind.MAIN_GRAD]),
    ],
)
def test_values_do_not_change_what_an_optimizer_has(statistic, name, kinds):
    """It reads a gradient where this rank has none: that gradient is not wrong."""
    wrong = verdict("mlp.weight", Kind.MAIN_GRAD, Outcome.DIVERGED, margin=9.0)
    culprits = localise([wrong, miscounted(name, statistic.number)])
    assert [culprit.kind for culprit in culprits] == kinds


FC1, ROUTER = "mlp.shared_experts.linear_fc1", "mlp.router"


@pytest.mark.parametrize("again", ["", "#1"])
@pytest.mark.parametrize(
    ("errors", "weights", "named"),
    [
        ((9.0, 9.0), (ROUTER,), [ROUTER]),
        ((9.0, 9.0), (FC1, ROUTER), [FC1, ROUTER]),
        ((9.0, 9.0), (), [f"{FC1}; {ROUTER}"]),
        # Different sizes of the error are different gradients; all that is zero has the error 1.
        ((60.0, 90.0), (ROUTER,), [FC1, ROUTER]),
        ((1.0, 1.0), (ROUTER,), [FC1, ROUTER]),
    ],
)
def test_modules_that_share_their_input(errors, weights, named, again):
    """The one with a wrong weight gradient is named; without such a difference all are, as one.

    So it is in a module's second run.
    """
    names = f"{FC1}{again}", f"{ROUTER}{again}"
    right = Kind.INPUT, Kind.OUTPUT, Kind.GRAD_OUTPUT
    verdicts = failing(
        *((name, kind, 0.1) for name in names for kind in right),
        *((f"{name}.weight", Kind.MAIN_GRAD, 9.0) for name in weights),
    )
    for name, error in zip(names, errors, strict=True):
        verdicts.append(verdict(name, Kind.GRAD_INPUT, Outcome.DIVERGED, margin=error))
    names = []
    for culprit in localise(verdicts):
        shared = re.search(r"shared with (.*), which may be", culprit.reason)
        names.append(culprit.name + (f"; {shared[1]}" if shared else ""))
    assert names == [name.replace(";", f"{again};") + again for name in named]


def test_routers_below_one_that_is_right() -> None:
    """The gradients of their weights are wrong as a consequence."""
    routers = ("layers.1.mlp.router", "layers.0.mlp.router")
    assert found(
        [
            *(verdict(at, Kind.ROUTING, microbatch=0, index=RoutingIndex.CHOICE) for at in routers),
            *failing(
                *(("layers.1.mlp", Kind.GRAD_OUTPUT, 0.1), (routers[0], Kind.GRAD_OUTPUT, 0.1)),
                *(("layers.1.mlp", Kind.GRAD_INPUT, 7.0), (routers[0], Kind.GRAD_INPUT, 7.0)),
                *(("layers.0.mlp", Kind.GRAD_OUTPUT, 3.0), (routers[1], Kind.GRAD_OUTPUT, 0.9)),
                *(("layers.0.mlp", Kind.GRAD_INPUT, 8.0), (routers[1], Kind.GRAD_INPUT, 8.0)),
                *((f"{routers[1]}.weight", Kind.MAIN_GRAD, 1.3),),
            ),
        ]
    ) == ["layers.1.mlp", "layers.0.mlp"]


@pytest.mark.parametrize("isolated", [False, True])
def test_a_missing_module_is_a_matter_of_forward(isolated):
    """Also with isolation, though it is a parameter that shows it."""
    missing = verdict("decoder.layers.1.mlp.linear_fc1.weight", Kind.PARAM, Outcome.MISSING)
    (culprit,) = localise([missing], isolated=isolated)
    place = culprit.name, culprit.direction
    assert place == ("decoder.layers.1.mlp.linear_fc1", Direction.FORWARD)


def test_the_norm_of_what_is_left_is_no_culprit():
    """A parameter that the optimizer does not know is missing in the norm of all gradients."""
    unknown = verdict("mlp.experts.w", Kind.EXP_AVG, Outcome.MISSING)
    norm = verdict("grad_norm", Kind.GRAD_NORM, Outcome.DIVERGED, margin=9.0)
    for verdicts, name in (([norm], "grad_norm"), ([norm, unknown], "mlp.experts.w")):
        assert [culprit.name for culprit in localise(verdicts, isolated=True)] == [name]
