#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Llama 3.1 8B on 2 GPUs, laid out as in Megatron-Bridge's llama/llama31_8b_pretrain_2gpu_h100_bf16.
torchrun --nproc-per-node 2 "$(dirname "${BASH_SOURCE[0]}")/../pretrain_gpt.py" \
  --context-parallel-size 2 \
  --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \
  --group-query-attention --num-query-groups 8 --seq-length 8192 --max-position-embeddings 131072 \
  --rotary-base 500000 --use-rope-scaling \
  --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear \
  --untie-embeddings-and-output-weights \
  --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
  --hidden-dropout 0 --attention-dropout 0 \
  --micro-batch-size 1 --global-batch-size 128 --train-iters 1000 --lr 3e-4 \
  --lr-decay-style cosine --mock-data --tokenizer-type NullTokenizer --vocab-size 128256 "$@"
