# SPDX-License-Identifier: Apache-2.0
"""Megatron accepts the arguments that are derived for a single device. Nothing is trained."""

import argparse
import sys

import pytest

from megatron_ttrace import cpu

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


@pytest.fixture(scope="module")
def megatron():
    """Its arguments, on the CPU backend."""
    cpu.activate()
    from megatron.training import arguments

    return arguments


@pytest.mark.parametrize("job", JOBS)
def test_the_reference_is_valid(megatron, monkeypatch, job):
    """As one rank, through all of Megatron's own validation."""
    from megatron_ttrace.cpu.arguments import adapt_arguments
    from megatron_ttrace.mcore.options import decisions

    parser = megatron.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    words = f"{MODEL} {JOBS[job]}".split()
    known, unknown = parser.parse_known_args(words)
    del known
    if unknown:
        pytest.skip(f"this release has no {unknown[0]}")
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *words])
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    args = megatron.parse_args()
    for name, value in decisions.derive(args).items():
        if hasattr(args, name):
            setattr(args, name, value)
    adapt_arguments(args)
    megatron.validate_args(args)
    try:
        from megatron.training.argument_utils import core_transformer_config_from_args
    except ImportError:  # until 0.17
        core_transformer_config_from_args = megatron.core_transformer_config_from_args
    config = core_transformer_config_from_args(args)
    assert config.tensor_model_parallel_size == 1
    assert args.data_parallel_size == 1
