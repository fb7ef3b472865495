# SPDX-License-Identifier: Apache-2.0
"""What `make test-versions` runs with every supported release of megatron-core."""

import os
from pathlib import Path

import pytest

from megatron_ttrace.evaluation.matrix.configurations import arguments_of
from megatron_ttrace.mcore.versions import megatron_core_version
from megatron_ttrace.trace.findings import Cause
from tests.integration.jobs import check, ttrace
from tests.integration.test_layouts import alarms, rows_of

pytestmark = [pytest.mark.releases, pytest.mark.timeout(900)]

LAYOUTS = (
    *("tp2/gpt/fp32", "tp2-sp/gpt/bf16", "pp2/llama/bf16", "dp2-zero/llama/fp32"),
    *("dp2-zero-overlap/gpt/fp32", "tp2-pp2/llama/fp32", "recompute-uniform/gpt/fp32"),
    *("te-tp2-sp/llama-te/bf16", "cp2/gpt-te/fp32", "mtp-tp2/llama-te/fp32"),
    *("pp2-vpp2/gpt/fp32", "pp2-vpp2/llama/fp32", "ep2-alltoall/moe/fp32"),
)
BIASES = "--overlap-grad-reduce --moe-router-score-function sigmoid --moe-router-enable-expert-bias"


def test_the_release_is_the_one_that_is_meant() -> None:
    """The path decides which release is tested; a slip would test another one in silence."""
    meant = os.environ.get("TTRACE_TEST_RELEASE")
    # Inside a git checkout Megatron 0.18 adds that checkout's commit to its version.
    assert meant in (None, megatron_core_version().partition("+")[0])


def test_healthy_layouts(tmp_path: Path) -> None:
    """One layout of each sort raises no alarm."""
    rows = rows_of(*LAYOUTS, cwd=tmp_path)
    assert len(rows) == len(LAYOUTS)
    assert not alarms(rows)


def test_biases_of_routers(tmp_path: Path) -> None:
    """In 0.18 they are bf16 until a first forward pass, which only the candidate makes here."""
    job = arguments_of("moe", f"ep2 alltoall --bf16 --mock-data {BIASES}")
    check(tmp_path, model=job, TTRACE_CACHE="")


def test_grouped_experts_over_tensor_parallel_ranks(tmp_path: Path) -> None:
    """0.19 marks their weights; before, nothing does: docs/findings.md, 29."""
    unmarked = megatron_core_version() < "0.19"
    job = arguments_of("moe-te", "tp2 sp ep2 etp1 alltoall --mock-data")
    checked = check(tmp_path, model=job, code=int(unmarked), TTRACE_CACHE="")
    causes = {culprit.cause for culprit in checked.summary.culprits}
    assert causes == ({Cause.NEVER_COUNTED} if unmarked else set())


def test_known_bugs(tmp_path: Path) -> None:
    """A forward and a gradient bug: the healthy jobs pass, the faulty ones are found."""
    ttrace("bugs", "run", "01", "11", cwd=tmp_path, timeout=600, code=0)
