# SPDX-License-Identifier: Apache-2.0
"""Megatron accepts the arguments that are derived for a single device. Nothing is trained."""

import os

import pytest

from tests import warm
from tests.mcore.options.derive import UNKNOWN

MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 8 --train-iters 3 "
    "--lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 128 --bf16 "
    "--disable-bias-linear --position-embedding-type rope --eval-interval 1000"
)
EXPERTS = "--num-experts 4 --expert-model-parallel-size 2 --moe-grouped-gemm"
PIPELINE = "--pipeline-model-parallel-size 2"
ZERO = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
FSDP = (
    "--use-megatron-fsdp --use-distributed-optimizer --ckpt-format fsdp_dtensor "
    "--data-parallel-sharding-strategy optim_grads_params --untie-embeddings-and-output-weights"
)
JOBS = {
    "fp8 parameters": f"{ZERO} --fp8-format e4m3 --fp8-recipe tensorwise --fp8-param-gather",
    "mxfp8 parameters": f"{ZERO} --fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather "
    "--reuse-grad-buf-for-mxfp8-param-ag",
    "precision-aware": f"{ZERO} --use-precision-aware-optimizer --main-grads-dtype bf16",
    "offloaded": f"{ZERO} --use-precision-aware-optimizer --optimizer-cpu-offload",
    "expert overlap": f"{EXPERTS} --overlap-moe-expert-parallel-comm --delay-wgrad-compute "
    "--moe-token-dispatcher-type alltoall",
    "flex": f"{EXPERTS} --moe-token-dispatcher-type flex --moe-router-dtype fp32",
    "shared expert overlap": f"{EXPERTS} --moe-token-dispatcher-type alltoall "
    "--moe-shared-expert-intermediate-size 64 --moe-shared-expert-overlap",
    "levels of CP": "--context-parallel-size 4 --cp-comm-type a2a+p2p "
    "--hierarchical-context-parallel-sizes 2 2",
    "deferred embedding": f"{PIPELINE} --defer-embedding-wgrad-compute --wgrad-deferral-limit 2",
    "pipeline layout": f"{PIPELINE} --pipeline-model-parallel-layout Et|t|t|tL",
    "uneven pipeline": f"{PIPELINE} --decoder-first-pipeline-num-layers 1",
    "interleaved": f"{PIPELINE} --num-layers-per-virtual-pipeline-stage 1 {ZERO} "
    "--microbatch-group-size-per-virtual-pipeline-stage 2",
    "fsdp": f"{FSDP} --init-model-with-meta-device --fsdp-double-buffer",
    "fsdp, user buffers": f"{FSDP} --use-nccl-ub --fsdp-manual-registration",
    "fsdp2": "--use-torch-fsdp2 --no-gradient-accumulation-fusion "
    "--untie-embeddings-and-output-weights",
    "instances": f"{ZERO} --num-distributed-optimizer-instances 2",
    "sequence": "--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap",
    "recomputation": "--tensor-model-parallel-size 2 --recompute-granularity full "
    "--recompute-method uniform --recompute-num-layers 1 --distribute-saved-activations",
    "buckets": f"{ZERO} --ddp-num-buckets 4 --ddp-pad-buckets-for-high-nccl-busbw",
    "graphs": "--cuda-graph-impl local --te-rng-tracker",
    "checkpoints": "--save a --save-interval 1 --load a --async-save "
    "--exit-on-missing-checkpoint --check-weight-hash-across-dp-replicas-interval 5",
    "batches that grow": "--rampup-batch-size 4 4 16",
}


@pytest.mark.parametrize("job", JOBS)
def test_the_reference_is_valid(tmp_path, job):
    """As one rank, through all of Megatron's own validation."""
    environment = {**os.environ, "WORLD_SIZE": "1", "RANK": "0"}
    environment.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    words = ["-m", "tests.mcore.options.derive", *f"{MODEL} {JOBS[job]}".split()]
    done = warm.run(words, cwd=tmp_path, env=environment, timeout=600)
    if done.returncode == UNKNOWN:
        pytest.skip(done.stdout)
    assert done.returncode == 0, done.stderr
