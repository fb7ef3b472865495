# SPDX-License-Identifier: Apache-2.0
"""launch/pretrain_gpt.py with the embedding and all attention layers frozen, as for fine-tuning."""

import importlib.util
from pathlib import Path

import megatron_ttrace

megatron_ttrace.enable()

from megatron.core.models.gpt import GPTModel  # noqa: E402

build = GPTModel.__init__


def frozen(self, *args, **keywords):
    """Before Megatron wraps the model: what does not want gradients gets no buffers."""
    build(self, *args, **keywords)
    for name, parameter in self.named_parameters():
        if "embedding" in name or "self_attention" in name:
            parameter.requires_grad_(False)


GPTModel.__init__ = frozen
spec = importlib.util.spec_from_file_location(
    "pretrain_gpt", Path(__file__).parents[2] / "launch" / "pretrain_gpt.py"
)
training = importlib.util.module_from_spec(spec)
spec.loader.exec_module(training)
training.main()
