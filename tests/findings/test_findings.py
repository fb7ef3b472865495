# SPDX-License-Identifier: Apache-2.0
"""Each fault of Megatron's diverges, and with that one thing fixed it is equivalent."""

import json
import os
from pathlib import Path

import pytest

from megatron_ttrace.evaluation.matrix import configurations as matrix
from megatron_ttrace.evaluation.suites import Data, data_arguments
from tests.integration.jobs import TINY, check, python, ttrace
from tests.saved.huggingface.jobs import BESIDE, TWINS, arguments, needs_transformers

SCRIPT = Path(__file__).with_name("fixed.py")
TE = "--transformer-impl transformer_engine"
CP = f"{TE} --context-parallel-size 2 --position-embedding-type rope"
SINKS = "--tensor-model-parallel-size 2 --softmax-type learnable"
MLA = (
    f"{TE} --tensor-model-parallel-size 2 --multi-latent-attention --kv-lora-rank 16 "
    "--qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8 --normalization RMSNorm --swiglu "
    "--disable-bias-linear"
)
SPARSE = matrix.MODELS["dsa-te"] + " --context-parallel-size 2 --cp-comm-type allgather"

META = (
    f"{matrix.MODELS['moe-deep']} --expert-model-parallel-size 2 {matrix.FLAGS['fsdp']} "
    "optim_grads_params --calculate-per-token-loss --init-model-with-meta-device "
    "--deterministic-mode --moe-token-dispatcher-type alltoall --global-batch-size 4"
)
ZEROS = (
    f"{matrix.MODELS['llama-te']} --tensor-model-parallel-size 2 --sequence-parallel "
    "--use-megatron-fsdp --ckpt-format fsdp_dtensor --log-num-zeros-in-grad "
    "--data-parallel-sharding-strategy optim_grads_params"
)
ZERO3 = f"{matrix.FLAGS['fsdp']} optim_grads_params"
INSTANCES = f"{matrix.MODELS['llama-te']} {ZERO3} --num-distributed-optimizer-instances 2"
INSTANCES += " --global-batch-size 8"
GLOBAL = (
    "--transformer-impl local --disable-bias-linear --num-experts 4 --moe-aux-loss-coeff 0.1 "
    "--moe-router-load-balancing-type global_aux_loss"
)
FEW_GROUPS = (
    "--transformer-impl local --tensor-model-parallel-size 4 --group-query-attention --bf16 "
    "--num-query-groups 2 --optimizer muon --muon-tp-mode duplicated --hidden-size 64 "
    "--num-attention-heads 8 --global-batch-size 8"
)
ADAPTIVE = (
    "--transformer-impl local --tensor-model-parallel-size 2 --optimizer adaptive_muon --bf16 "
    "--muon-tp-mode duplicated"
)
DROPOUT = (
    f"{TE} --hybrid-layer-pattern *-*- --tensor-model-parallel-size 2 --sequence-parallel "
    "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec --hidden-dropout 0.1"
)
EXPERTS = matrix.PARTS["experts"]
STAGES = (
    f"{TE} {EXPERTS} --moe-aux-loss-coeff 0.01 --moe-layer-freq 2 --sequence-parallel "
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
)
LLAMA = matrix.MODELS["llama-te"]
DELTA = matrix.MODELS["gdn-te"] + " --tensor-model-parallel-size 2"
FSDP = f"{TE} {matrix.FLAGS['fsdp']} optim_grads_params --bf16"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fixes", "arguments"),
    [
        ("mla-rotary-key", MLA),
        ("mla-rotary-key", f"{MLA} --sequence-parallel --q-lora-rank 16 --mla-down-proj-fusion"),
        (
            "experts-delayed",
            f"{TE} {EXPERTS} --moe-grouped-gemm --moe-token-dispatcher-type alltoall "
            "--expert-model-parallel-size 2 --overlap-dispatch-backward-with-experts-wgrad",
        ),
        ("masked-tokens", f"{CP} --eod-mask-loss"),
        ("hybrid-masks", DROPOUT),
        ("predicted-tokens", f"{CP} --mtp-num-layers 1"),
        ("train-only-sinks sinks", SINKS),
        ("indexer", SPARSE),
        ("delta-net-start", f"{DELTA} --sequence-parallel"),
        ("delta-net-start delta-net-norm", DELTA),
        (
            "fsdp-scaled-gradients",
            f"{FSDP} --tensor-model-parallel-size 2 --sequence-parallel --calculate-per-token-loss",
        ),
        (
            "norm-after-dense",
            f"{TE} --bf16 {EXPERTS} --moe-grouped-gemm --expert-model-parallel-size 2 "
            f"{matrix.FLAGS['in-pieces']} --moe-layer-freq [1,0]",
        ),
        (
            "fsdp-single-copies",
            f"{FSDP} {EXPERTS} --moe-grouped-gemm --expert-model-parallel-size 2 "
            "--global-batch-size 8",
        ),
        (
            "fsdp2-scaled-gradients",
            f"{TE} {matrix.FLAGS['fsdp2']} --calculate-per-token-loss --bf16",
        ),
        ("meta-buffers", META),
        ("sharded-zeros", ZEROS),
        (
            "padded-zeros",
            f"{LLAMA} --tensor-parallel-num-weight-shards 2 --ffn-hidden-size 40 "
            "--log-num-zeros-in-grad",
        ),
        ("fsdp-last-microbatch", INSTANCES),
        (
            "fsdp-helper-factor fsdp-outer-norm",
            f"{INSTANCES} {matrix.FLAGS['overlap']} --outer-dp-sharding-strategy optim",
        ),
        (
            "fsdp-outer-sum",
            f"{INSTANCES} {matrix.FLAGS['overlap']} --calculate-per-token-loss "
            "--ddp-average-in-collective",
        ),
        ("unclipped-norm", f"{matrix.MODELS['llama-te']} {ZERO3} --clip-grad 0"),
        ("constant-load global-loss", GLOBAL),
        ("adaptive-muon-runs adaptive-muon-scale", ADAPTIVE),
        ("muon-whole-qkv", FEW_GROUPS),
        (
            "muon-replicas",
            f"{MLA} --sequence-parallel --bf16 --optimizer muon --muon-tp-mode duplicated",
        ),
        ("stages-without-experts", STAGES),
        (
            "fsdp-expert-norm",
            f"{FSDP} {EXPERTS} --moe-grouped-gemm --expert-model-parallel-size 2 "
            "--calculate-per-token-loss --log-params-norm",
        ),
        (
            "layer-wise-norm",
            "--bf16 --use-distributed-optimizer --optimizer muon --log-params-norm",
        ),
        (
            "gathered-norm",
            f"{LLAMA} --lr 1e-2 --use-distributed-optimizer {matrix.FLAGS['overlap']} "
            "--log-params-norm",
        ),
        (
            "precise-norm",
            f"{TE} --bf16 --use-distributed-optimizer --use-precision-aware-optimizer "
            "--log-params-norm --optimizer-cpu-offload --optimizer-offload-fraction 1 "
            "--fp8-format hybrid --fp8-recipe tensorwise",
        ),
        (
            "standalone-mtp",
            f"--transformer-impl local --position-embedding-type rope --mtp-num-layers 1 {EXPERTS} "
            "--moe-layer-freq 2 --pipeline-model-parallel-size 2 "
            "--pipeline-model-parallel-layout Ett|mL",
        ),
        ("fsdp2-norm", f"{TE} {matrix.FLAGS['fsdp2']} --log-params-norm"),
        (
            "fsdp2-experts",
            f"{TE} {matrix.FLAGS['fsdp2']} {EXPERTS} --moe-token-dispatcher-type alltoall "
            "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1",
        ),
        (
            "experts-and-shards",
            f"{LLAMA} {EXPERTS} --moe-token-dispatcher-type alltoall "
            "--expert-model-parallel-size 2 --tensor-parallel-num-weight-shards 2",
        ),
        (
            "shards-when-needed",
            f"{LLAMA} --tensor-parallel-num-weight-shards 2 --recompute-granularity full "
            "--recompute-method uniform --recompute-num-layers 1",
        ),
        (
            "shards-and-random-init",
            f"{TE} --untie-embeddings-and-output-weights --disable-bias-linear "
            "--tensor-parallel-num-weight-shards 2 --data-parallel-random-init",
        ),
        (
            "own-states",
            f"{LLAMA} {ZERO3} --tensor-model-parallel-size 2 --sequence-parallel "
            "--hidden-dropout 0.1",
        ),
        (
            "copies-of-experts",
            f"{LLAMA} {EXPERTS} --bf16 --optimizer muon --muon-tp-mode duplicated "
            "--use-distributed-optimizer --tensor-model-parallel-size 2 --sequence-parallel "
            "--expert-tensor-parallel-size 1",
        ),
        ("detached-heads", f"{LLAMA} {ZERO3} --mtp-num-layers 1 --mtp-detach-heads"),
        (
            "few-samples whole-batches",
            f"{LLAMA} --dataloader-type cyclic --no-data-sharding --micro-batch-size 1 "
            "--global-batch-size 16",
        ),
    ],
)
def test_a_fix_makes_it_equivalent(fixes, arguments, tmp_path):
    """The last one does: so the cause is what it fixes, and nothing else is wrong."""
    job = [*TINY, *arguments.split()]
    if "--eod-mask-loss" in job:
        job.remove("--mock-data")
        job += data_arguments(Data.DOCUMENTS, tmp_path, 64)
    ranks = 4 if arguments.startswith((INSTANCES, FEW_GROUPS, STAGES)) else 2
    for fix, code in ((fixes.rpartition(" ")[0], 1), (fixes, 0)):
        variables = {"FIX": fix, "TTRACE_CACHE": ""}
        check(tmp_path, model=job, nproc=ranks, script=SCRIPT, code=code, **variables)


@pytest.mark.nightly
@needs_transformers
def test_a_factor_of_rope_scaling(tmp_path):
    """Only a model of transformers shows that it has no effect."""
    twin = TWINS["llama3"]
    twin.write(tmp_path, rope_scaling={**twin.config["rope_scaling"], "factor": 32.0})
    found = []
    for fixes in ("", "rope-scaling-factor"):
        done = ttrace(
            *("check", "--json", "--ttrace-no-wandb", "--ttrace-dir", f"out{fixes}"),
            *("--against", "hf:config.json", "--", SCRIPT),
            *arguments(twin, ("--rope-scaling-factor", "32")),
            cwd=tmp_path,
            cold=True,
            FIX=fixes,
            PYTHONPATH=os.pathsep.join([str(Path(__file__).parents[2]), BESIDE]),
        )
        names = [culprit["name"] for culprit in json.loads(done.stdout)[1]["culprits"]]
        found.append((done.returncode, *names[:1]))
    assert found == [(1, "rotary_pos_emb"), (0,)]


@pytest.mark.nightly
def test_a_loss_that_rounds(tmp_path):
    """The gradient of float32 logits."""
    script = Path(__file__).with_name("loss_dtype.py")
    done = python(script, cwd=tmp_path, cold=True, code=0)
    assert done.stdout.strip() == "torch.bfloat16"


@pytest.mark.nightly
def test_cached_angles_belong_to_other_positions(tmp_path):
    """YaRN's on two ranks; in a process of its own, for it switches the CPU backend on for good."""
    script = Path(__file__).with_name("yarn_positions.py")
    done = python(script, cwd=tmp_path, cold=True, code=0)
    assert "rank 0: positions [0, 1, 6, 7], with the cache [0, 1, 2, 3]" in done.stdout
    assert "rank 1: positions [2, 3, 4, 5], with the cache [4, 5, 6, 7]" in done.stdout
