# SPDX-License-Identifier: Apache-2.0
"""Jobs that combine what shows a known fault of Megatron's are recognised."""

import re
from pathlib import Path

import pytest

from megatron_ttrace.jobs import known_faults as known
from megatron_ttrace.jobs.shrink.given import Given
from tests.integration.jobs import SCRIPT, TINY, ttrace

ROOT = Path(__file__).parents[2]


def test_known_findings_are_those_of_the_page():
    """Headings are spelled as they stand there, and name what is combined."""
    text = (ROOT / "docs" / "findings.md").read_text()
    for finding in known.findings():
        for flag in Given.parse(f"{finding.given} {finding.absent}".split()).flags:
            assert flag.option, flag
        assert re.search(rf"^## [0-9]+\. {re.escape(finding.heading)}", text, re.MULTILINE)
    words = "--multi-latent-attention --tensor-model-parallel-size 2"
    assert known.finding_of(words.split(), "0.19.2") == "MLA without sequence parallelism"
    assert known.finding_of([*words.split(), "--sequence-parallel"], "0.19.2") == ""
    words = "--use-megatron-fsdp --tensor-model-parallel-size 2 --sequence-parallel --bf16"
    per_token = [*words.split(), "--calculate-per-token-loss"]
    assert known.finding_of(per_token, "0.19.2") == "Megatron-FSDP and per-token losses"
    assert known.finding_of(words.split(), "0.19.2") == ""
    assert (
        known.finding_of([*per_token, "--megatron-fsdp-main-grads-dtype", "fp32"], "0.19.2") == ""
    )
    grouped = "--moe-grouped-gemm --tensor-model-parallel-size 2".split()
    assert known.finding_of(grouped, "0.18.2") == "Grouped experts with TP"
    assert known.finding_of(grouped, "0.19.2") == ""


@pytest.mark.nightly
def test_a_check_names_it(tmp_path):
    """In the notices of a job that diverges; the cause is not concluded from it."""
    words = "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4"
    words += " --v-head-dim 8 --normalization RMSNorm --disable-bias-linear --swiglu"
    words += " --tensor-model-parallel-size 2 --transformer-impl transformer_engine"
    done = ttrace(
        *("check", "--nproc-per-node", "2", "--", SCRIPT, *TINY, *words.split()), cwd=tmp_path
    )
    assert done.returncode == 1
    assert "MLA without sequence parallelism" in done.stdout
