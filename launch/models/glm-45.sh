#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# GLM-4.5 355B-A32B on 128 GPUs, laid out as in Megatron-Bridge's glm/glm45_355b_pretrain_128gpu_h100_bf16.
torchrun --nproc-per-node 8 --nnodes 16 "$(dirname "${BASH_SOURCE[0]}")/../pretrain_gpt.py" \
  --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 8 \
  --decoder-last-pipeline-num-layers 8 --expert-model-parallel-size 16 \
  --expert-tensor-parallel-size 1 --recompute-granularity selective \
  --num-layers 92 --hidden-size 5120 --ffn-hidden-size 12288 --num-attention-heads 96 \
  --kv-channels 128 --group-query-attention --num-query-groups 8 --add-qkv-bias --qk-layernorm \
  --rotary-percent 0.5 --rotary-base 1000000 --num-experts 160 --moe-router-topk 8 \
  --moe-ffn-hidden-size 1536 --moe-shared-expert-intermediate-size 1536 \
  --moe-layer-freq '([0]*3+[1]*89)' --moe-router-score-function sigmoid \
  --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3 \
  --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 \
  --moe-router-topk-scaling-factor 2.5 --mtp-num-layers 1 --seq-length 4096 \
  --max-position-embeddings 131072 --moe-grouped-gemm --moe-permute-fusion --moe-router-dtype fp32 \
  --moe-token-dispatcher-type alltoall \
  --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear \
  --untie-embeddings-and-output-weights \
  --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
  --hidden-dropout 0 --attention-dropout 0 \
  --micro-batch-size 1 --global-batch-size 2048 --train-iters 1000 --lr 3e-4 \
  --lr-decay-style cosine --mock-data --tokenizer-type NullTokenizer --vocab-size 151552 "$@"
