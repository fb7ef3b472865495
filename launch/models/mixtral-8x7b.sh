#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Mixtral 8x7B on 64 GPUs, laid out as in Megatron-LM's examples/mixtral.
torchrun --nproc-per-node 8 --nnodes 8 "$(dirname "${BASH_SOURCE[0]}")/../pretrain_gpt.py" \
  --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 8 \
  --expert-model-parallel-size 8 \
  --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \
  --group-query-attention --num-query-groups 8 --seq-length 4096 --max-position-embeddings 32768 \
  --rotary-base 1000000 --num-experts 8 --moe-router-topk 2 \
  --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm \
  --moe-permute-fusion --moe-router-dtype fp32 --moe-token-dispatcher-type alltoall \
  --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear \
  --untie-embeddings-and-output-weights \
  --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
  --hidden-dropout 0 --attention-dropout 0 \
  --micro-batch-size 1 --global-batch-size 256 --train-iters 1000 --lr 3e-4 \
  --lr-decay-style cosine --mock-data --tokenizer-type NullTokenizer --vocab-size 32000 "$@"
