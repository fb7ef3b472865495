# SPDX-License-Identifier: Apache-2.0
"""A hunt remembers by which values a job failed."""

import pytest

from megatron_ttrace.evaluation.hunt import hunting
from megatron_ttrace.evaluation.hunt.combinations import Dimension, Space
from megatron_ttrace.evaluation.recipes import run as running
from megatron_ttrace.evaluation.recipes.collect import Answer
from megatron_ttrace.evaluation.recipes.run import JobRow, Results
from megatron_ttrace.jobs.commands.command_line import Command
from megatron_ttrace.jobs.known_faults import Finding
from megatron_ttrace.jobs.shrink.command_flags import CommandFlags

BASE = Command(
    "x.py", tuple("--num-layers 2 --hidden-size 64 --num-attention-heads 4".split()), ranks=1
)
DIMENSIONS = tuple(
    Dimension(name, (value, ""))
    for name, value in {
        "precision": "--bf16",
        "clipping": "--clip-grad 0",
        "activation": "--swiglu",
        "biases": "--disable-bias-linear",
    }.items()
)


class Checks:
    """Gated activations fail without biases; the rest is equivalent."""

    def __init__(self):
        self.checked, self.built, self.alone = [], 0, []

    def arguments(self, job):
        """No data."""
        return job.arguments

    def fails(self, job, *, early=False):
        """Whether it fails alone."""
        self.built += 1
        self.alone.append(set(job.arguments))
        return set(job.arguments) >= {"--swiglu", "--disable-bias-linear"}

    def __call__(self, job):
        self.checked.append(job)
        answer = Answer.FAILS if self.fails(job) else Answer.EQUIVALENT
        return JobRow(key=job.key, answer=answer, ranks=job.ranks)


@pytest.fixture
def everything_valid(monkeypatch):
    """Nothing of Megatron is imported."""
    monkeypatch.setattr(
        hunting.validity, "options", lambda words, _: CommandFlags.parse(words).options()
    )
    monkeypatch.setattr(running.fingerprint, "code", lambda script: {})


def hunt(tmp_path, fails=()):
    """All combinations, the rows, and the checks that were needed."""
    checks = Checks()
    hunted = hunting.Hunt(Space(BASE, DIMENSIONS), checks, Results(tmp_path), 8, 0, fails=fails)
    return list(hunted.run(60.0)), checks


def test_what_fails_together_is_not_tried_again(tmp_path, everything_valid):
    """One job fails; no other has the two values, and a repeated hunt knows that without a job."""
    tried, checks = hunt(tmp_path)
    (failed,) = (each.row for each in tried if each.row.answer is Answer.FAILS)
    assert {value for _, value in failed.together} == {
        "--swiglu",
        "--disable-bias-linear",
    }
    assert len(checks.checked) == len(tried) > 2
    again, idle = hunt(tmp_path)
    assert [each.row for each in again] == [each.row for each in tried]
    assert (idle.checked, idle.built) == ([], 0)


def test_what_is_known_to_fail_is_not_tried(tmp_path, everything_valid):
    """So no job fails."""
    known = Finding("biases", {"swiglu": "*", "add_bias_linear": "*"})
    tried, checks = hunt(tmp_path, [known])
    assert len(tried) > 2
    assert {each.row.answer for each in tried} == {Answer.EQUIVALENT}
    assert checks.built == len(checks.checked)


def test_a_known_fault_is_not_tried_for_why_another_job_fails(
    tmp_path, everything_valid, monkeypatch
):
    """It might hang, or fail for a reason of its own."""

    def finding_of(options, version):
        return "hangs" if "swiglu" in options and "bf16" not in options else ""

    monkeypatch.setattr(hunting.known_faults, "finding_of", finding_of)
    tried, checks = hunt(tmp_path)
    (failed,) = (each.row for each in tried if each.row.answer is Answer.FAILS)
    assert {value for _, value in failed.together} == {
        "--bf16",
        "--swiglu",
        "--disable-bias-linear",
    }
    assert all("--bf16" in alone for alone in checks.alone if "--swiglu" in alone)
