# SPDX-License-Identifier: Apache-2.0
"""Where changed code ran on any rank; what one rank cannot say is not known."""

import dataclasses
from types import SimpleNamespace

import pytest

from megatron_ttrace.compare.norms import write_calls
from megatron_ttrace.run.recording import changed, merged
from megatron_ttrace.trace import codec, folded
from megatron_ttrace.trace.collectives import CallNorms, Norm, Phase, RankLedger
from megatron_ttrace.trace.executed import ChangedCode, Edit, Edits, Executed, Execution
from tests.placement.meshes import mesh_of

EDITS = Edits(
    "v1", (Edit("a.py", "f", 1), Edit("a.py", "g", 2), Edit("a.py", "h", 3, is_seen=False))
)


def message(*ran, error=""):
    """A rank's."""
    return {"executed": {"ran": codec.encode(ran), "error": error}}


@pytest.mark.parametrize("error", ["", "lost"])
def test_changed(error):
    """Modules and parts of all ranks; a decorated function, and a lost record, leave it open."""
    ran = Executed(0, "layers.*", Phase.FORWARD), Executed(0, "", Phase.OPTIMIZER)
    messages = [message(ran[0]), message(*ran, error=error)]
    changed_code = changed(EDITS, messages, folded.Once())
    assert isinstance(changed_code, ChangedCode)
    first, second, third = changed_code.functions
    assert (first.ran, first.modules) == (Execution.ELSEWHERE, ("layers.*",))
    assert first.phases == (Phase.FORWARD, Phase.OPTIMIZER)
    assert second.ran is (Execution.NOT_KNOWN if error else Execution.NOT_RUN)
    assert third.ran is Execution.NOT_KNOWN


def test_nothing_was_changed():
    """There is nothing to say."""
    assert changed(Edits(), [message()], folded.Once()) is None


@pytest.mark.parametrize("why", ["", "lost"])
def test_functions_that_were_not_recorded(why):
    """The first rank that lost some is named; its collectives count all the same."""
    messages = [
        {**RankLedger().to_json(), "executed": {"ran": [], "error": "", "unrecorded": text}}
        for text in ("", why, why)
    ]
    args = SimpleNamespace(bf16=True, num_experts=None, accumulate_allreduce_grads_in_fp32=False)
    meshes = [mesh_of(rank, 3) for rank in range(3)]
    ledger, notices = merged(meshes, messages, args, folded.Once())
    assert ledger.recorded
    assert [("rank 1" in notice, why in notice) for notice in notices] == [(True, True)] * bool(why)


@pytest.mark.parametrize(("factor", "expected"), [(2.0, ["alike"]), (1.0, ["strays"])])
def test_what_functions_returned(factor, expected, tmp_path):
    """Of ranks that measured it; gradients have a factor."""
    given, half, whole = ((Norm(4, norm),) for norm in (1.0, 2.0, 4.0))
    theirs = CallNorms("m.py:1 (f)", "layers.0", Phase.BACKWARD, given, half)
    ours = dataclasses.replace(theirs, returned=whole)
    ledgers = RankLedger(norms=(ours,), factor=factor), RankLedger()
    executed = {"ran": [], "error": ""}
    messages = [{**ledger.to_json(), "executed": executed} for ledger in ledgers]
    args = SimpleNamespace(bf16=True, num_experts=None, accumulate_allreduce_grads_in_fp32=False)
    meshes = [mesh_of(rank, 2) for rank in range(2)]
    write_calls(tmp_path, [theirs, dataclasses.replace(theirs, module="layers.1")])
    reference = SimpleNamespace(directory=tmp_path, verify=lambda name: None)
    ledger, _ = merged(meshes, messages, args, folded.Once(), reference)
    assert [each.agreement for each in ledger.compared] == expected
