#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Qwen3 32B on 16 GPUs, laid out as in Megatron-Bridge's qwen/qwen3_32b_pretrain_16gpu_h100_bf16.
torchrun --nproc-per-node 8 --nnodes 2 "$(dirname "${BASH_SOURCE[0]}")/../pretrain_gpt.py" \
  --tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 2 \
  --num-layers 64 --hidden-size 5120 --ffn-hidden-size 25600 --num-attention-heads 64 \
  --group-query-attention --num-query-groups 8 --kv-channels 128 --qk-layernorm \
  --norm-epsilon 1e-6 --rotary-base 1000000 --seq-length 4096 --max-position-embeddings 40960 \
  --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear \
  --untie-embeddings-and-output-weights \
  --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
  --hidden-dropout 0 --attention-dropout 0 \
  --micro-batch-size 1 --global-batch-size 32 --train-iters 1000 --lr 3e-4 --lr-decay-style cosine \
  --mock-data --tokenizer-type NullTokenizer --vocab-size 151936 "$@"
