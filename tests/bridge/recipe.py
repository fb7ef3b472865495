# SPDX-License-Identifier: Apache-2.0
"""A recipe of Megatron-Bridge, made small, on two data-parallel ranks.

The recipe asks a model hub for a configuration; ``HF_HUB_CACHE`` would have it. Here its class
makes it.
"""

from common import LENGTH, SMALL
from megatron.bridge import AutoBridge
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from transformers import LlamaConfig

hf = LlamaConfig(**SMALL, architectures=["LlamaForCausalLM"])
AutoBridge.from_hf_pretrained = lambda path, **_: AutoBridge.from_hf_config(hf)

from megatron.bridge.recipes.llama import llama32_1b_pretrain_config  # noqa: E402

cfg = llama32_1b_pretrain_config()
cfg.model.seq_length = cfg.dataset.seq_length = LENGTH
cfg.model.vocab_size = cfg.tokenizer.vocab_size = 128
cfg.train.train_iters, cfg.train.global_batch_size = 2, 4
cfg.scheduler.lr_warmup_iters = 1
cfg.validation.eval_iters = 0
cfg.logger.log_interval, cfg.logger.tensorboard_dir = 1, None
cfg.checkpoint.save = cfg.checkpoint.load = None
pretrain(cfg, forward_step)
