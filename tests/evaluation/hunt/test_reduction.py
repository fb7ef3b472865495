# SPDX-License-Identifier: Apache-2.0
"""A diverging job is reduced to the layout and flags without which it does not diverge."""

import dataclasses

import pytest

from megatron_ttrace.evaluation.hunt.reduction import Reduced, reduce
from megatron_ttrace.evaluation.recipes.collect import Answer, SmallJob
from megatron_ttrace.evaluation.recipes.run import JobRow
from megatron_ttrace.jobs.commands.command_line import Command
from megatron_ttrace.jobs.shrink import plan
from megatron_ttrace.jobs.shrink.command_flags import CommandFlags

WORDS = (
    "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --context-parallel-size 2 "
    "--num-layers 8 --hidden-size 256 --num-attention-heads 16 --seq-length 512 --swiglu "
    "--max-position-embeddings 512 --micro-batch-size 1 --global-batch-size 16 --lr 1e-3 "
    "--sequence-parallel --use-distributed-optimizer --overlap-grad-reduce --bf16 "
    "--train-iters 10 --transformer-impl transformer_engine"
).split()
COMMAND = Command("x.py", tuple(WORDS), ranks=64)


class Checks:
    """A fault in one module that needs TP and SP; another module always fails with a known one."""

    def __init__(self):
        self.asked = []

    def __call__(self, job: SmallJob) -> JobRow:
        self.asked.append(job)
        given = CommandFlags.parse(job.arguments)
        row = JobRow(key=job.key, answer=Answer.COULD_NOT_CHECK, ranks=job.ranks, command=str(job))
        if not given.has("lr"):
            return row
        if given.integer("tensor_model_parallel_size", 1) > 1 and given.has("sequence_parallel"):
            return row_of(row, "decoder.layers.mlp")
        if given.has("swiglu"):
            return row_of(row, "decoder.layers.mlp", finding="a known one")
        return row_of(row)


def row_of(row: JobRow, *modules: str, finding: str = "") -> JobRow:
    """It diverges in these modules; without any it is equivalent."""
    answer = Answer.DIVERGED if modules else Answer.EQUIVALENT
    return dataclasses.replace(row, answer=answer, modules=modules, finding=finding)


@pytest.fixture(scope="module")
def reduced() -> tuple[Reduced, Checks]:
    """The reduction of the command's first small job, and the checks that it took."""
    checks = Checks()
    (first, *_) = plan.shrink(COMMAND).jobs
    row = checks(SmallJob("x.py", first.arguments, first.axes.ranks, ()))
    return reduce(COMMAND, first, row, checks, 8), checks


def test_what_it_needs(reduced):
    """Axes, then flags; a known fault in the same module is another one."""
    found, checks = reduced
    assert found.axes == {"tp": 2}
    assert set(found.flags) == {"--sequence-parallel", "--lr 1e-3"}
    assert "--overlap-grad-reduce" in found.left_out
    assert "--swiglu" in found.left_out
    assert found.row.modules == ("decoder.layers.mlp",)
    assert found.row.finding == ""
    assert found.checked < len(checks.asked)


def test_the_pattern(reduced):
    """Other jobs that combine what a reduced one needs show the same fault."""
    pattern = reduced[0].pattern()
    assert pattern.fits(CommandFlags.parse(WORDS).options())
    others = [word for word in WORDS if word != "--sequence-parallel"]
    assert not pattern.fits(CommandFlags.parse(others).options())


def test_the_nearest_healthy_job(reduced):
    """It differs from the smallest diverging one by a flag."""
    found, checks = reduced
    healthy = next(str(job) for job in checks.asked if str(job) == found.healthy)
    assert "--sequence-parallel" not in healthy
