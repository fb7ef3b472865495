# SPDX-License-Identifier: Apache-2.0
"""Jobs that combine what shows a known fault of Megatron's are recognised."""

import json
import re
from pathlib import Path

import pytest

from megatron_ttrace.jobs import known_faults as known
from megatron_ttrace.mcore.options.decisions import SINGLE_DEVICE
from megatron_ttrace.mcore.options.roles import ROLES
from megatron_ttrace.mcore.sharded_weights import SHARDS_OF_WEIGHTS
from megatron_ttrace.trace.outcomes import Unexercised
from tests import warm
from tests.integration.jobs import SCRIPT, TINY, ttrace
from tests.programs import environment

ROOT = Path(__file__).parents[2]
TE = "--transformer-impl transformer_engine"
MLA = (
    f"{TE} --multi-latent-attention --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 "
    "--v-head-dim 8 --normalization RMSNorm --swiglu --disable-bias-linear "
    "--tensor-model-parallel-size 2"
)
FSDP = (
    f"{TE} --tensor-model-parallel-size 2 --sequence-parallel --bf16 --use-megatron-fsdp "
    "--ckpt-format fsdp_dtensor --data-parallel-sharding-strategy optim_grads_params"
)
TORCH_FSDP = (
    "--use-torch-fsdp2 --ckpt-format torch_dist --no-gradient-accumulation-fusion "
    "--untie-embeddings-and-output-weights"
)
EXPERTS = (
    f"{TE} --num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --disable-bias-linear "
    "--expert-model-parallel-size 2"
)
FSDP_EXPERTS = f"{EXPERTS} --use-megatron-fsdp --ckpt-format fsdp_dtensor"
IN_PIECES = (
    f"{EXPERTS} --moe-token-dispatcher-type alltoall --overlap-moe-expert-parallel-comm --bf16"
)
PREDICTION = (
    "--transformer-impl local --position-embedding-type rope --mtp-num-layers 1 --num-experts 4 "
    "--disable-bias-linear --moe-layer-freq 2 --pipeline-model-parallel-size 2 "
    "--pipeline-model-parallel-layout"
)
JOBS = [
    (MLA, 2, "MLA without sequence"),
    (f"{MLA} --sequence-parallel", 2, ""),
    (
        f"{MLA} --sequence-parallel --q-lora-rank 16 --mla-down-proj-fusion",
        2,
        "MLA without sequence",
    ),
    (f"{FSDP} --calculate-per-token-loss", 2, "Megatron-FSDP and per-token losses"),
    (
        f"{TE} --context-parallel-size 2 --dataloader-inter-document-masking",
        2,
        "`--dataloader-inter-document-masking` and CP",
    ),
    (FSDP, 2, ""),
    (
        f"{EXPERTS} --moe-token-dispatcher-type alltoall "
        "--overlap-dispatch-backward-with-experts-wgrad",
        2,
        "`--overlap-dispatch-backward",
    ),
    (f"{FSDP} --calculate-per-token-loss --megatron-fsdp-main-grads-dtype fp32", 2, ""),
    (f"{TE} {TORCH_FSDP} --log-params-norm", 2, "torch FSDP2: the logged norm"),
    (f"{TE} {TORCH_FSDP}", 2, ""),
    (
        f"{FSDP_EXPERTS} --global-batch-size 8 --log-params-norm",
        4,
        "Megatron-FSDP and EP: the logged norm",
    ),
    (f"{FSDP} --clip-grad 0", 2, "Megatron-FSDP and `--clip-grad 0`"),
    (FSDP_EXPERTS, 2, "Megatron-FSDP and experts"),
    (f"{FSDP_EXPERTS} --global-batch-size 8", 4, ""),
    (f"{FSDP_EXPERTS} --data-parallel-sharding-strategy optim", 2, ""),
    (
        f"{EXPERTS} --moe-router-load-balancing-type aux_loss global_aux_loss "
        "--moe-aux-loss-coeff 0.1 0.1",
        2,
        "Global auxiliary loss",
    ),
    (f"{IN_PIECES} --moe-layer-freq [1,0]", 2, "Overlapped expert communication: a dense"),
    (f"{IN_PIECES} --moe-layer-freq 2", 2, "Overlapped expert communication: a dense"),
    (IN_PIECES, 2, ""),
    (
        "--optimizer muon --bf16 --tensor-model-parallel-size 4 --group-query-attention "
        "--num-query-groups 2 --transformer-impl local",
        4,
        "Muon, and fewer query groups",
    ),
    (
        "--reset-attention-mask --transformer-impl local --pipeline-model-parallel-size 2 "
        "--num-layers-per-virtual-pipeline-stage 1 --num-layers 4",
        2,
        "`--reset-attention-mask` and pipelines",
    ),
    (f"{PREDICTION} Ett|mL", 2, "Multi-token prediction in a stage without decoder layers"),
    (f"{PREDICTION} Et|tmL", 2, ""),
    (
        "--bf16 --use-distributed-optimizer --optimizer muon --log-params-norm",
        2,
        "Layer-wise optimizers: the logged norm",
    ),
    (
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
        "--log-params-norm",
        2,
        "float32 and `--overlap-param-gather`",
    ),
]
DERIVED = (
    "data_parallel_size",
    *("expert_data_parallel_size", "use_layer_wise_distributed_optimizer"),
    *SHARDS_OF_WEIGHTS,
)
ADAPTERS = {"peft.share_expert_adapters": True, "peft.target_modules": ["linear_fc1"]}
GEMMA = {"model.per_layer_embed_dim": 256, "tensor_model_parallel_size": 2}
PACKED = {"dataset.enable_offline_packing": True}
TP = {"tensor_model_parallel_size": 2}
SECOND_FSDP = {"use_megatron_fsdp": True, "megatron_fsdp_version": 2, "data_parallel_size": 4}
DIVIDED = {
    "use_megatron_fsdp": True,
    "data_parallel_sharding_strategy": "optim_grads_params",
    "expert_model_parallel_size": 2,
    "data_parallel_size": 4,
    "clip_grad": 1.0,
}


def test_known_findings_are_those_of_the_page():
    """Headings are spelled as they are there, and options are Megatron's, or Bridge's fields."""
    text = (ROOT / "docs" / "findings.md").read_text()
    for finding in known.findings():
        for option in (*finding.given, *finding.absent, *(finding.larger or ())):
            assert option in {*ROLES, *SINGLE_DEVICE, *DERIVED} or "." in option, option
        assert re.search(rf"^## [0-9]+\. {re.escape(finding.heading)}", text, re.MULTILINE)


def test_a_job_is_recognised_by_its_final_options(tmp_path):
    """What a command leaves to defaults counts, and how a flag is written does not."""
    jobs = [[[*TINY, *words.split()], ranks] for words, ranks, _ in JOBS]
    words = ["-m", "tests.jobs.recognised", json.dumps(jobs)]
    done = warm.run(words, cwd=tmp_path, env=environment(), timeout=600)
    assert done.returncode == 0, done.stderr
    for (words, _, heading), finding in zip(JOBS, json.loads(done.stdout), strict=True):
        assert finding is not None, words
        assert (bool(finding), finding.startswith(heading)) == (bool(heading), True), words


@pytest.mark.parametrize(
    ("fields", "release", "heading"),
    [
        # Fields of Megatron-Bridge are options by another name, or ``section.field``.
        ({"expert_model_parallel_size": 2, **ADAPTERS}, "0.19.2", "Megatron-Bridge: with EP, a"),
        ({"expert_model_parallel_size": 1, **ADAPTERS}, "0.19.2", ""),
        ({"expert_tensor_parallel_size": 2, **ADAPTERS}, "0.19.2", "Megatron-Bridge: adapters of"),
        ({**PACKED, "overlap_moe_expert_parallel_comm": True}, "0.19.2", "Megatron-Bridge: with o"),
        (PACKED, "0.19.2", ""),
        ({**GEMMA, "sequence_parallel": False}, "0.19.2", "Megatron-Bridge: Gemma 4's dense"),
        ({**GEMMA, "sequence_parallel": True}, "0.19.2", ""),
        ({**GEMMA, "qk_layernorm": True}, "0.19.2", ""),
        (
            {**PACKED, "mtp_num_layers": 1, "context_parallel_size": 2},
            "0.19.2",
            "Multi-token prediction shifts packed samples",
        ),
        # By their old name, by that of main, and as a layer of a hybrid model.
        ({"experimental_attention_variant": "gated_delta_net", **TP}, "0.20.0", "Gated delta nets"),
        ({"experimental_attention_variant": "gdn", **TP}, "0.20.0", "Gated delta nets"),
        ({"hybrid_layer_pattern": "G*-", **TP}, "0.20.0", "Gated delta nets"),
        # Fixed in the later release.
        ({"moe_grouped_gemm": True, **TP}, "0.18.2", "Grouped experts with TP"),
        ({"moe_grouped_gemm": True, **TP}, "0.19.2", ""),
        # A norm that is not computed is not too large.
        ({**SECOND_FSDP, "clip_grad": 0.0}, "0.20.0", "Megatron-FSDP and `--clip-grad 0`"),
        ({**SECOND_FSDP, "clip_grad": 1.0}, "0.20.0", "Megatron-FSDP version 2"),
        # Megatron-FSDP divides weights over the ranks of one instance of the optimizer.
        (DIVIDED, "0.19.2", ""),
        (
            {**DIVIDED, "num_distributed_optimizer_instances": 2},
            "0.19.2",
            "Megatron-FSDP and experts without copies",
        ),
    ],
)
def test_a_job_is_recognised(fields, release, heading):
    """By what its options are in a release."""
    finding = known.finding_of(fields, release)
    assert finding.startswith(heading)
    assert bool(finding) == bool(heading)


def test_an_option_without_effect():
    """Loss masks that mask no token do not show what is wrong with them."""
    fields = {"eod_mask_loss": True, "context_parallel_size": 2, "use_megatron_fsdp": True}
    assert known.finding_of(fields, "0.19.2").startswith("Loss masks and CP")
    idle = [Unexercised.LOSS_MASK]
    assert "`--clip-grad 0`" in known.finding_of(fields, "0.19.2", idle)


@pytest.mark.nightly
def test_a_check_names_it(tmp_path):
    """In the notices of a job that diverges; the cause is not concluded from it."""
    words = "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4"
    words += " --v-head-dim 8 --normalization RMSNorm --disable-bias-linear --swiglu"
    words += " --tensor-model-parallel-size 2 --transformer-impl transformer_engine"
    done = ttrace(
        *("check", "--nproc-per-node", "2", "--", SCRIPT, *TINY, *words.split()),
        cwd=tmp_path,
        code=1,
    )
    assert "MLA without sequence parallelism" in done.stdout
