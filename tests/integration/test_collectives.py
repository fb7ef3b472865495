# SPDX-License-Identifier: Apache-2.0
"""A reduction that is missing is missing in the ledger, and the culprit says so."""

import json
import re
from pathlib import Path

import pytest

from megatron_ttrace.trace.collectives import Collective, LedgerFault, Operation, Phase
from megatron_ttrace.trace.findings import Cause
from megatron_ttrace.trace.records import Summary
from tests.integration.jobs import TP, Checked, check, ttrace

BROKEN = "decoder.layers.1.mlp.linear_fc1"


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Checked:
    """A job whose second layer lacks a reduction in its backward pass."""
    saved = ("--ttrace-save-candidate",)
    directory = tmp_path_factory.mktemp("collectives")
    return check(directory, *TP, flags=saved, code=1, mistake="unreduced_input_gradients")


def culprits_of(summary: Summary) -> None:
    """The culprit cites what did not run, and where that would have been."""
    culprit = summary.culprits[0]
    assert (culprit.name, culprit.direction.value) == (BROKEN, "backward")
    assert culprit.collectives == (
        "no reduction over tp ran in its backward pass; "
        "its sibling in another layer ran all_reduce over tp"
    )
    assert re.fullmatch(
        r"megatron/core/tensor_parallel/layers\.py:\d+ "
        r"\(LinearWithGradAccumulationAndAsyncCommunication\.backward\)",
        culprit.where,
    )


def test_a_missing_reduction(checked: Checked) -> None:
    """In the summary, the ledger and the page."""
    summary = checked.summary
    culprits_of(summary)
    assert summary.collective_findings == ()
    ran = [
        Collective.from_json(json.loads(line))
        for line in (checked.out / "collectives.jsonl").read_text().splitlines()
    ]
    reduced = {
        one.module: (one.group, one.size, one.dtype, one.ranks)
        for one in ran
        if one.direction is Phase.BACKWARD and one.operation is Operation.ALL_REDUCE
    }
    assert BROKEN not in reduced
    assert reduced["decoder.layers.0.mlp.linear_fc1"] == ("tp", 2, "float32", (0, 1))
    layers = [row for row in summary.collectives if row.module == "decoder.layers.*.mlp.linear_fc2"]
    assert [(row.modules, row.direction.value) for row in layers] == [(2, "forward")]
    page = (checked.out / "report.html").read_text()
    assert "Collectives of the traced steps" in page
    assert "decoder.layers.*.mlp.linear_fc2" in page


def test_from_the_saved_candidate(checked: Checked) -> None:
    """``ttrace compare`` says the same."""
    traces = [checked.out / side for side in ("reference", "candidate")]
    done = ttrace("compare", "--json", *traces, cwd=checked.out.parent, code=1)
    culprits_of(Summary.from_json(json.loads(done.stdout)))


def test_a_low_precision(tmp_path: Path) -> None:
    """Gradients that are kept and reduced in bf16, where the settings say float32."""
    mistake = "gradients_in_low_precision"
    summary = check(tmp_path, "--bf16", code=1, mistake=mistake).summary
    assert {culprit.cause for culprit in summary.culprits} == {Cause.PRECISION}
    (finding,) = summary.collective_findings
    assert (finding.fault, finding.operation) == (LedgerFault.PRECISION, Operation.ALL_REDUCE)
    assert (finding.group, finding.dtype, finding.expected) == ("dp", "bfloat16", "float32")
    (ran,) = finding.ran
    assert ran.ranks == (0, 1)
    assert ran.where.endswith("(_ParamAndGradBucketGroup.start_grad_sync)")
