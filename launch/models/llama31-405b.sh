#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Llama 3.1 405B on 256 GPUs, laid out as in Megatron-Bridge's llama/llama31_405b_pretrain_256gpu_h100_bf16.
torchrun --nproc-per-node 8 --nnodes 32 "$(dirname "${BASH_SOURCE[0]}")/../pretrain_gpt.py" \
  --tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 8 \
  --num-layers-per-virtual-pipeline-stage 2 --context-parallel-size 4 \
  --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split \
  --num-layers 126 --hidden-size 16384 --ffn-hidden-size 53248 --num-attention-heads 128 \
  --group-query-attention --num-query-groups 8 --seq-length 8192 --max-position-embeddings 131072 \
  --rotary-base 500000 --use-rope-scaling \
  --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear \
  --untie-embeddings-and-output-weights \
  --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
  --hidden-dropout 0 --attention-dropout 0 \
  --micro-batch-size 1 --global-batch-size 512 --train-iters 1000 --lr 3e-4 \
  --lr-decay-style cosine --mock-data --tokenizer-type NullTokenizer --vocab-size 128256 "$@"
