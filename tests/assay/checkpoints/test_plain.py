# SPDX-License-Identifier: Apache-2.0
"""Faults are real, or left out."""

import dataclasses

import pytest

from tests.assay.checkpoints.faults import Planted
from tests.assay.checkpoints.jobs import Layout, jobs
from tests.assay.checkpoints.plain import Proof, Workshop
from tests.assay.planted.checkpoint_faults import Side
from tests.assay.planted.checkpoints import Fault


def test_what_is_real():
    """Something differs, and Megatron does not refuse."""
    real = Proof("", (("exp_avg", "a"),), ("0 optimizer0.0.0.exp_avg",), True)
    assert real.is_real
    assert not dataclasses.replace(real, loud="ValueError").is_real
    assert not dataclasses.replace(real, differs=(), trains=False).is_real
    assert Proof.of(dataclasses.asdict(real)) == real


@pytest.mark.nightly
def test_proofs(tmp_path):
    """Moments that are lost are real on either side; a fault of data has no wrong tensor."""
    workshop, job = Workshop(tmp_path), jobs()["tp"]
    layout = Layout.of("2 tp2")
    healthy = workshop.resumed(job, layout)
    assert healthy.code == 0, healthy.error
    assert set(healthy.bits) < set(workshop.saved(job).bits)
    for side in Side:
        proof = workshop.prove(Planted(Fault(side, "lost_moment", 1), job, layout))
        assert proof.is_real
        assert proof.trains
        assert {name.rpartition(".")[2] for name in proof.differs} == {
            state for state, _ in proof.truth
        }
    skipped = workshop.prove(Planted(Fault(Side.LOAD, "skipped_data", 1), job, layout))
    assert {name.split()[1] for name in skipped.differs} == {"consumed_train_samples"}
    assert skipped.trains
