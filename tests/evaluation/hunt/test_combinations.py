# SPDX-License-Identifier: Apache-2.0
"""Combinations have all pairs of values that go together, each with an effect."""

import pytest

from megatron_ttrace.evaluation.hunt.combinations import Covering, Dimension, Space, table
from megatron_ttrace.jobs.commands.command_line import Command
from megatron_ttrace.jobs.shrink.command_flags import CommandFlags

BASE = Command(
    "x.py", ("--num-layers", "4", "--swiglu", "--tensor-model-parallel-size", "2"), ranks=4
)
DIMENSIONS = (
    Dimension("tensor", ("--tensor-model-parallel-size 4", "--tensor-model-parallel-size 1")),
    Dimension("copies", ("3",), copies=True),
    Dimension("activation", ("--squared-relu | --no-bias-gelu-fusion", "--swiglu --quick-geglu")),
    Dimension("experts", ("--num-experts 4", "--num-experts 8 --moe-grouped-gemm")),
    Dimension("router", ("--moe-router-dtype fp32",), within="experts"),
)


@pytest.fixture
def space():
    """A small one."""
    return Space(BASE, DIMENSIONS)


def test_a_command(space):
    """A value replaces its dimension's options; ranks follow the axes."""
    command = space.command({"tensor": "--tensor-model-parallel-size 4", "copies": "3"})
    assert command.ranks == 24
    given = CommandFlags.parse(command.arguments)
    assert given.integer("tensor_model_parallel_size") == 4
    assert given.has("swiglu")
    plain = CommandFlags.parse(space.command({"activation": DIMENSIONS[2].values[0]}).arguments)
    assert not plain.has("swiglu")
    assert [plain.flags[0].name, plain.flags[-1].name] == [
        "--no-bias-gelu-fusion",
        "--squared-relu",
    ]
    assert space.command({}) == BASE


def test_what_the_base_has_can_be_left_out(space):
    """That is one more value; of what it does not have, it is none."""
    assert space.values["activation"][-1].strip() == ""
    assert space.values["router"] == DIMENSIONS[4].values
    without = space.command({"activation": space.values["activation"][-1]})
    assert not CommandFlags.parse(without.arguments).has("swiglu")


def run(covering):
    """All combinations, of which each is compared."""
    made = []
    for combination in covering:
        made.append(combination)
        covering.ran(combination)
    return made


def test_all_pairs_are_covered(space):
    """But those that are not valid; each combination has an effect, and the seed decides."""

    def valid(combination):
        return not {"--num-experts 4", "--tensor-model-parallel-size 1"} <= set(
            combination.values()
        )

    covering = Covering(space, valid, seed=1)
    made = run(covering)
    assert made[0] == {}
    assert all(valid(combination) and space.has_effect(combination) for combination in made)
    assert covering.covered | covering.excluded == set(space.pairs())
    assert len(covering.excluded) == 1
    assert len(made) < len(space.pairs()) / 2
    assert made == run(Covering(space, valid, seed=1))
    # In each process, whatever the order of a set there: a job's key depends on it.
    assert all([*combination][:2] == sorted([*combination][:2]) for combination in made)
    assert made != run(Covering(space, valid, seed=2))


def test_what_did_not_run_covers_nothing(space):
    """Its pairs are tried again with other values."""
    covering = Covering(space, lambda combination: True, seed=1)
    assert len(list(covering)) == 1 + len(space.pairs())
    assert not covering.covered


def test_the_table():
    """Names are different, and flags are Megatron's."""
    found = table()
    names = [each.name for each in found.dimension]
    assert len(names) == len(set(names))
    assert {each.within for each in found.dimension} <= {"", *names}
    for dimension in found.dimension:
        for value in () if dimension.copies else dimension.values:
            for flag in CommandFlags.parse(value.replace(" | ", " ").split()).flags:
                assert flag.option, flag
