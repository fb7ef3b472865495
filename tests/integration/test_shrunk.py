# SPDX-License-Identifier: Apache-2.0
"""Known bugs in large configurations, found in the jobs that these shrink to."""

import dataclasses
import re

import pytest

from megatron_ttrace.evaluation.bugs import catalogue, expect
from megatron_ttrace.evaluation.bugs.suite import MODELS
from megatron_ttrace.jobs.resources import launch_dir
from megatron_ttrace.jobs.shrink import axes, documents, plan
from megatron_ttrace.jobs.shrink.command_flags import CommandFlags
from megatron_ttrace.saved.runner import NO_WANDB, Case, Runner
from tests.evaluation.bugs.test_shrunk import large_job

BUGS = catalogue.load_catalogue()


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    """One for all."""
    return Runner(tmp_path_factory.mktemp("shrunk"), flags=("--ttrace-device", "cpu", NO_WANDB))


@pytest.mark.nightly
@pytest.mark.parametrize("bug", BUGS, ids=[bug.id for bug in BUGS])
def test_the_same_culprit(runner, bug):
    """TP 8, PP 8, CP 4, EP 16, DP 16 as the bug needs them, shrunk: found where it is expected."""
    layout = bug.layouts[-1]
    model = layout.models[0]
    found = plan.shrink(large_job(layout, model))
    catalogued = CommandFlags.parse([*MODELS[model].split(), *layout.arguments])
    wanted = set(axes.of_large(catalogued, layout.nproc).spread())
    job = next(job for job in found.jobs if wanted <= set(job.axes.spread()))
    prefix = documents.write(runner.directory / "data" / "text")
    script = str(launch_dir() / "pretrain_gpt.py")
    case = Case(
        name=bug.id,
        arguments=(*job.arguments, *documents.arguments(script, prefix)),
        nproc=job.axes.ranks,
        flags=(*layout.flags, "--ttrace-bug", bug.id),
    )
    expected = bug.expected
    if layout.healthy:
        # Layers that do not divide: the last one is dropped, which is another one here.
        last = CommandFlags.parse(job.arguments).integer("num_layers") - 1
        module = re.sub(r"layers\.[0-9]+", f"layers.{last}", expected.module)
        expected = dataclasses.replace(expected, module=module)
    assessed = expect.assess(runner.run(case).summary, expected)
    assert assessed.detected
    assert assessed.localised, assessed.problem
