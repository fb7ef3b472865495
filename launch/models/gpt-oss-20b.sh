#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# GPT-OSS 20B on 16 GPUs, laid out as in Megatron-Bridge's gpt_oss/gpt_oss_20b_pretrain_16gpu_h100_bf16.
torchrun --nproc-per-node 8 --nnodes 2 "$(dirname "${BASH_SOURCE[0]}")/../pretrain_gpt.py" \
  --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 4 \
  --expert-model-parallel-size 4 --expert-tensor-parallel-size 1 \
  --num-layers 24 --hidden-size 2880 --ffn-hidden-size 2880 --num-attention-heads 64 \
  --kv-channels 64 --group-query-attention --num-query-groups 8 --num-experts 32 \
  --moe-router-topk 4 --moe-ffn-hidden-size 2880 --moe-router-load-balancing-type none \
  --softmax-type learnable --window-size 127,0 --window-attn-skip-freq 2 --quick-geglu \
  --no-bias-dropout-fusion --glu-linear-offset 1.0 --activation-func-clamp-value 7.0 \
  --add-qkv-bias --rotary-base 150000 --seq-length 4096 --max-position-embeddings 131072 \
  --moe-grouped-gemm --moe-permute-fusion --moe-router-dtype fp32 \
  --moe-token-dispatcher-type alltoall \
  --position-embedding-type rope --normalization RMSNorm --untie-embeddings-and-output-weights \
  --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
  --hidden-dropout 0 --attention-dropout 0 \
  --micro-batch-size 1 --global-batch-size 512 --train-iters 1000 --lr 3e-4 \
  --lr-decay-style cosine --mock-data --tokenizer-type NullTokenizer --vocab-size 201088 "$@"
