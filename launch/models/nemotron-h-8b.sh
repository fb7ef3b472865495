#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Nemotron-H 8B on 2 GPUs, laid out as in Megatron-Bridge's nemotronh/nemotronh_8b_pretrain_2gpu_h100_bf16.
torchrun --nproc-per-node 2 "$(dirname "${BASH_SOURCE[0]}")/../pretrain_hybrid.py" \
  --tensor-model-parallel-size 2 --sequence-parallel \
  --hybrid-layer-pattern M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M- --hidden-size 4096 \
  --ffn-hidden-size 21504 --num-attention-heads 32 --group-query-attention --num-query-groups 8 \
  --kv-channels 128 --mamba-num-heads 128 --mamba-state-dim 128 --mamba-head-dim 64 \
  --mamba-num-groups 8 --squared-relu --seq-length 8192 --max-position-embeddings 8192 \
  --position-embedding-type none --normalization RMSNorm --disable-bias-linear \
  --untie-embeddings-and-output-weights \
  --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
  --hidden-dropout 0 --attention-dropout 0 \
  --micro-batch-size 1 --global-batch-size 768 --train-iters 1000 --lr 3e-4 \
  --lr-decay-style cosine --mock-data --tokenizer-type NullTokenizer --vocab-size 131072 "$@"
