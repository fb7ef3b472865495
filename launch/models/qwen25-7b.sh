#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Qwen2.5 7B on 2 GPUs, laid out as in Megatron-Bridge's qwen/qwen25_7b_pretrain_2gpu_h100_bf16.
torchrun --nproc-per-node 2 "$(dirname "${BASH_SOURCE[0]}")/../pretrain_gpt.py" \
  --tensor-model-parallel-size 2 --sequence-parallel \
  --num-layers 28 --hidden-size 3584 --ffn-hidden-size 18944 --num-attention-heads 28 \
  --group-query-attention --num-query-groups 4 --norm-epsilon 1e-6 --add-qkv-bias \
  --rotary-base 1000000 --seq-length 4096 --max-position-embeddings 131072 \
  --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear \
  --untie-embeddings-and-output-weights \
  --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
  --hidden-dropout 0 --attention-dropout 0 \
  --micro-batch-size 1 --global-batch-size 32 --train-iters 1000 --lr 3e-4 --lr-decay-style cosine \
  --mock-data --tokenizer-type NullTokenizer --vocab-size 152064 "$@"
