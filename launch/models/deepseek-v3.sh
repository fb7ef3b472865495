#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# DeepSeek-V3 on 1024 GPUs, laid out as in Megatron-Bridge's deepseek/deepseek_v3_pretrain_1024gpu_h100_bf16.
torchrun --nproc-per-node 8 --nnodes 128 "$(dirname "${BASH_SOURCE[0]}")/../pretrain_gpt.py" \
  --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 16 \
  --pipeline-model-parallel-layout 'Et*4|(t*4|)*14tmL' --expert-model-parallel-size 64 \
  --expert-tensor-parallel-size 1 --recompute-granularity selective \
  --recompute-modules mla_up_proj mlp \
  --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 \
  --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048 \
  --moe-shared-expert-intermediate-size 2048 --moe-layer-freq '([0]*3+[1]*58)' \
  --moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-topk-scaling-factor 2.5 \
  --mtp-num-layers 1 --moe-grouped-gemm --moe-permute-fusion --moe-router-dtype fp32 \
  --moe-token-dispatcher-type alltoall --multi-latent-attention --q-lora-rank 1536 \
  --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm \
  --norm-epsilon 1e-6 --seq-length 4096 --max-position-embeddings 4096 \
  --moe-router-score-function sigmoid --moe-router-enable-expert-bias \
  --moe-router-bias-update-rate 1e-3 --moe-router-load-balancing-type seq_aux_loss \
  --moe-aux-loss-coeff 1e-4 \
  --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear \
  --untie-embeddings-and-output-weights \
  --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
  --hidden-dropout 0 --attention-dropout 0 \
  --micro-batch-size 1 --global-batch-size 8192 --train-iters 1000 --lr 3e-4 \
  --lr-decay-style cosine --mock-data --tokenizer-type NullTokenizer --vocab-size 129280 "$@"
