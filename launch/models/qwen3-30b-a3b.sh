#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Qwen3 30B-A3B on 16 GPUs, laid out as in Megatron-Bridge's qwen/qwen3_30b_a3b_pretrain_16gpu_h100_bf16.
torchrun --nproc-per-node 8 --nnodes 2 "$(dirname "${BASH_SOURCE[0]}")/../pretrain_gpt.py" \
  --expert-model-parallel-size 16 \
  --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 \
  --group-query-attention --num-query-groups 4 --moe-ffn-hidden-size 768 --num-experts 128 \
  --moe-router-topk 8 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 \
  --moe-grouped-gemm --moe-permute-fusion --moe-router-dtype fp32 \
  --moe-token-dispatcher-type alltoall --kv-channels 128 --qk-layernorm --norm-epsilon 1e-6 \
  --rotary-base 1000000 --seq-length 4096 --max-position-embeddings 40960 \
  --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear \
  --untie-embeddings-and-output-weights \
  --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
  --hidden-dropout 0 --attention-dropout 0 \
  --micro-batch-size 1 --global-batch-size 512 --train-iters 1000 --lr 3e-4 \
  --lr-decay-style cosine --mock-data --tokenizer-type NullTokenizer --vocab-size 151936 "$@"
