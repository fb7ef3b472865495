#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Qwen3 235B-A22B on 256 GPUs, laid out as in Megatron-Bridge's qwen/qwen3_235b_a22b_pretrain_256gpu_h100_bf16.
torchrun --nproc-per-node 8 --nnodes 32 "$(dirname "${BASH_SOURCE[0]}")/../pretrain_gpt.py" \
  --tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 16 \
  --num-layers-per-virtual-pipeline-stage 3 --context-parallel-size 2 \
  --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 \
  --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split \
  --num-layers 94 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 64 \
  --group-query-attention --num-query-groups 4 --moe-ffn-hidden-size 1536 --num-experts 128 \
  --moe-router-topk 8 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 \
  --moe-grouped-gemm --moe-permute-fusion --moe-router-dtype fp32 \
  --moe-token-dispatcher-type alltoall --kv-channels 128 --qk-layernorm --norm-epsilon 1e-6 \
  --rotary-base 1000000 --seq-length 4096 --max-position-embeddings 40960 \
  --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear \
  --untie-embeddings-and-output-weights \
  --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
  --hidden-dropout 0 --attention-dropout 0 \
  --micro-batch-size 1 --global-batch-size 1024 --train-iters 1000 --lr 3e-4 \
  --lr-decay-style cosine --mock-data --tokenizer-type NullTokenizer --vocab-size 151936 "$@"
