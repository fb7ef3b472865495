# SPDX-License-Identifier: Apache-2.0
"""The page counts pairs that were equivalent, and prints whatever a job says harmlessly."""

from megatron_ttrace.evaluation.hunt.combinations import Dimension, Space
from megatron_ttrace.evaluation.hunt.hunting import Tried
from megatron_ttrace.evaluation.hunt.page import cells, render
from megatron_ttrace.evaluation.hunt.reduction import Reduced
from megatron_ttrace.evaluation.recipes.collect import Answer
from megatron_ttrace.evaluation.recipes.run import JobRow
from megatron_ttrace.jobs.commands.command_line import Command

SPACE = Space(
    Command("x.py", ("--num-layers", "4"), ranks=1),
    (Dimension("clipping", ("--clip-grad 0", "--clip-grad 0.1")), Dimension("dtype", ("--bf16",))),
)


def tried(answer, why="", **values):
    """A combination."""
    row = JobRow(key="k", answer=answer, ranks=1, why=why, command="ttrace check")
    return Tried(combination=values, row=row)


def test_cells():
    """Both ways round; what diverged does not count."""
    good = tried(Answer.EQUIVALENT, clipping="--clip-grad 0", dtype="--bf16")
    bad = tried(Answer.DIVERGED, clipping="--clip-grad 0.1", dtype="--bf16")
    found = cells(SPACE, [good, good, bad])
    assert {(cell.good, cell.total, cell.shade) for cell in found.values()} == {(1, 2, 1)}
    assert set(found) == {("clipping", "dtype"), ("dtype", "clipping")}


def test_the_page():
    """All that was found, escaped."""
    unknown = tried(Answer.COULD_NOT_CHECK, "<script>alert(1)</script>", dtype="--bf16")
    row = JobRow(key="k", answer=Answer.DIVERGED, ranks=2, modules=("a.<b>",), command="ttrace c")
    more = {"left_out": (), "row": row, "healthy": "ttrace h", "checked": 3}
    reduced = Reduced(first="k", axes={"tp": 2}, flags=("--swiglu",), **more)
    text = render(SPACE, [unknown], [reduced])
    assert "<script>" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert "a.&lt;b&gt;" in text
    assert "--tensor-model-parallel-size 2+ --swiglu" in text
    assert "<h1>1 combination,\n1 new divergence</h1>" in text
