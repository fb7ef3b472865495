# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning of Megatron-Bridge on a small JSONL, on two data-parallel ranks."""

import sys
from pathlib import Path

from common import LENGTH, SMALL, configuration
from megatron.bridge import AutoBridge
from megatron.bridge.data.builders.gpt_sft import GPTSFTDatasetConfig
from megatron.bridge.training.config import TokenizerConfig
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from transformers import LlamaConfig

home = Path(sys.argv[1])
hf = LlamaConfig(**SMALL, architectures=["LlamaForCausalLM"])
model = AutoBridge.from_hf_config(hf).to_megatron_provider(load_weights=False)
data = GPTSFTDatasetConfig(
    seq_length=LENGTH, dataset_root=home, do_validation=False, do_test=False, num_workers=0
)
tokenizer = TokenizerConfig(
    tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(home / "tokenizer")
)
pretrain(configuration(model, dataset=data, tokenizer=tokenizer), forward_step)
