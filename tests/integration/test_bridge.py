# SPDX-License-Identifier: Apache-2.0
"""Checks of jobs of Megatron-Bridge; ``python -m tests.assay bridge`` runs many more."""

import json
import re

import pytest

from megatron_ttrace import load_report
from megatron_ttrace.trace.records import Kind, Result
from tests.assay.bridge import SCRIPTS, attempt, cases
from tests.bridge.data import SMALL
from tests.integration.jobs import torchrun, ttrace

pytestmark = pytest.mark.bridge
PATTERN = "model.interleaved_attn_pattern=(1,1)"
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
GEMMA = {
    "model_type": "gemma3_text",
    "head_dim": 16,
    "sliding_window": 16,
    "query_pre_attn_scalar": 24,
    "layer_types": ["sliding_attention", "full_attention"],
}


@pytest.mark.parametrize("name", ["llama-tp2-sp", "sft-dp2-mb2", "lora-tp2-sp"])
def test_a_healthy_job(name, tmp_path):
    """Pretraining, fine-tuning whose samples are dealt to ranks, and adapters of a loaded model."""
    row = attempt(cases()["healthy"][name], tmp_path)
    assert row.marks == {"as promised": True}, row
    assert row.details["tensors"] > 300
    assert not row.details["unchecked"]


def test_a_fault_of_megatron_bridge(tmp_path):
    """A rank that ignores its loss mask."""
    row = attempt(cases()["faults"]["loss-mask"], tmp_path)
    assert row.marks == {"as promised": True, "right module": True}, row


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
        *("check", "--quiet", "--nproc-per-node", 2, "--", SCRIPTS / "job.py", *words),
        cwd=tmp_path,
        code=2,
    )
    (line,) = done.stderr.splitlines()
    assert line.startswith("ttrace: ")
    assert reason in line


@pytest.mark.parametrize(
    ("words", "fields", "culprit"),
    [
        (["llama", "model.tensor_model_parallel_size=2", "fp32"], {"model_type": "llama"}, ""),
        (["experts", "model.moe_aux_loss_coeff=0.01"], QWEN3_MOE, ""),  # in bf16
        (["gemma", "epsilon", PATTERN, "fp32"], GEMMA, ""),
        # Finding 49.
        (["gemma", PATTERN, "fp32"], GEMMA, "decoder.layers.0.self_attention.linear_proj"),
    ],
)
def test_a_model_of_transformers(words, fields, culprit, tmp_path):
    """The reference of a job is compared with the model of a config.json."""
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, **fields}))
    done = ttrace(
        *("check", "--json", "--nproc-per-node", 2, "--ttrace-seeds", 2, "--against"),
        *("hf:config.json", "--", SCRIPTS / "job.py", *words),
        cwd=tmp_path,
    )
    own, other = json.loads(done.stdout)
    assert own["verdict"] == "equivalent"
    without = "the reference is that of the same job without --moe-aux-loss-coeff 0.01, bf16"
    assert (without in other["notices"]) is (fields is QWEN3_MOE)
    assert [each["name"] for each in other["culprits"]][:1] == ([culprit] if culprit else [])
    assert done.returncode == bool(culprit)


def test_a_callback(tmp_path):
    """It checks the first step, and training goes on as without it."""
    script = tmp_path / "train.py"
    code = (SCRIPTS / "llama.py").read_text()
    (tmp_path / "common.py").write_text((SCRIPTS / "common.py").read_text())
    logs = {}
    for name, callbacks in {"plain": "[]", "checked": "[TTraceCallback('out')]"}.items():
        imported = "from megatron_ttrace.bridge import TTraceCallback"
        body = f"import megatron_ttrace\nmegatron_ttrace.enable()\n{imported}\n"
        body += f"def callbacks(): return {callbacks}\n"
        script.write_text(body + code.replace("forward_step)", "forward_step, callbacks())"))
        done = torchrun(2, script, cwd=tmp_path, cold=True, code=0)
        logs[name] = re.findall(r"(?:lm loss|grad norm): (\S+)", done.stdout)
    assert load_report(tmp_path / "out").summary.verdict is Result.EQUIVALENT
    assert len(logs["plain"]) == 4
    assert logs["checked"] == logs["plain"]


def test_a_shrunk_job(tmp_path):
    """A script for 64 GPUs runs on four ranks, and a bug of the large job is found in the small."""
    large = ("torchrun", "--nproc-per-node", 8, "--nnodes", 8, SCRIPTS / "large.py")
    how = ("check", "--once", "--max-ranks", 4, "--shrink", "--ttrace-dir")
    done = ttrace(*how, "out", "--", *large, cwd=tmp_path, code=0)
    assert re.search(r"^ranks +64 +4 ", done.stderr, re.MULTILINE)
    assert re.search(r"^--hidden-size +4096 +64 ", done.stderr, re.MULTILINE)
    report = load_report(tmp_path / "out")
    assert len(list((tmp_path / "out" / "logs").glob("rank-*.log"))) == 4
    assert any("64 ranks" in notice for notice in report.summary.notices)
    ttrace(*how, "bug", "--quiet", "--ttrace-bug", "11", "--", *large, cwd=tmp_path, code=1)
    culprit = load_report(tmp_path / "bug").summary.culprits[0]
    assert (culprit.kind, culprit.name) == (Kind.MAIN_GRAD, "decoder.final_layernorm")


def test_what_cannot_be_shrunk(tmp_path):
    """A script that ends before it trains."""
    (tmp_path / "train.py").write_text("import megatron.bridge\n")
    done = ttrace("check", "--quiet", "--shrink", "--", "train.py", cwd=tmp_path, code=2)
    assert "train.py ended before pretrain()" in done.stderr
