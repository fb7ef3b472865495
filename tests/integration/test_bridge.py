# SPDX-License-Identifier: Apache-2.0
"""Checks of jobs of Megatron-Bridge; ``python -m tests.assay bridge`` runs many more."""

import pytest

from tests.assay.bridge.faults import faults
from tests.assay.bridge.jobs import SCRIPTS, check, jobs
from tests.integration.jobs import ttrace

pytestmark = pytest.mark.bridge


@pytest.mark.parametrize("name", ["llama-tp2-sp", "sft-dp2-mb2", "lora-tp2-sp"])
def test_a_healthy_job(name, tmp_path):
    """Pretraining, fine-tuning whose samples are dealt to ranks, and adapters of a loaded model."""
    answer = check(tmp_path, jobs()[name])
    assert answer.verdict == "equivalent", answer
    assert answer.tensors > 300
    assert not answer.unchecked


def test_a_fault_of_megatron_bridge(tmp_path):
    """A rank that ignores its loss mask."""
    fault = faults()["loss-mask"]
    answer = check(tmp_path, jobs()[fault.job], planted=fault.planted)
    assert fault.is_found_by(answer), answer


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["llama", "dist.use_decentralized_pg=True"], "dist.use_decentralized_pg=False"),
        (["llama", "train.global_batch_size=3"], "eval_global_batch_size (3) must be divisible by"),
        (["llama", "model.no_such_field=1"], "model.no_such_field: there is no such field"),
        (["llama", "--ttrace-no-such-flag"], "--ttrace-no-such-flag"),
        (
            ["experts", "lora", "peft.share_expert_adapters=False"],
            "peft.share_expert_adapters=False: ",
        ),
        (["no_such_config"], "AttributeError: module 'megatron.bridge.recipes.llama'"),
    ],
)
def test_wrong_input(words, reason, tmp_path):
    """One line with the reason, and exit code 2."""
    done = ttrace(
        *("check", "--quiet", "--nproc-per-node", 2, "--", SCRIPTS / "job.py", *words), cwd=tmp_path
    )
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("ttrace: ")
    assert reason in line
