# SPDX-License-Identifier: Apache-2.0
"""A Llama of Megatron-Bridge on mock data, its layers over two ranks."""

from common import configuration
from data import SMALL
from megatron.bridge import AutoBridge
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from transformers import LlamaConfig

hf = LlamaConfig(**SMALL, architectures=["LlamaForCausalLM"])
model = AutoBridge.from_hf_config(hf).to_megatron_provider(load_weights=False)
model.tensor_model_parallel_size = 2
model.sequence_parallel = True
pretrain(configuration(model), forward_step)
