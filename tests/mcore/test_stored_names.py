# SPDX-License-Identifier: Apache-2.0
"""What checkpoints call parameters."""

import re
from types import SimpleNamespace

import pytest
import torch

from megatron_ttrace.mcore.checkpoints.names import stored_name, stored_names

PAIRS = {
    "embedding.word_embeddings.weight": "embedding.word_embeddings.weight",
    "decoder.layers.3.input_layernorm.weight": (
        "decoder.layers.3.self_attention.linear_qkv.layer_norm_weight"
    ),
    "decoder.layers.12.mlp.experts.linear_fc1.weight5": (
        "decoder.layers.12.mlp.experts.experts.5.linear_fc1.weight"
    ),
    "decoder.layers.0.mlp.experts.local_experts.7.linear_fc2.bias": (
        "decoder.layers.0.mlp.experts.experts.7.linear_fc2.bias"
    ),
    "decoder.layers.1.mlp.shared_experts.linear_fc2.weight": (
        "decoder.layers.1.mlp.shared_experts.linear_fc2.weight"
    ),
    "mtp.layers.0.mtp_model_layer.layers.1.mlp.linear_fc1.weight": (
        "mtp.layers.0.transformer_layer.layers.1.mlp.linear_fc1.weight"
    ),
}


class Model(torch.nn.Module):
    """A model whose state has the pairs' names, with and without numbers."""

    def __init__(self, numbers: str) -> None:
        super().__init__()
        self.names = {name.replace(".", "_"): stored for name, stored in PAIRS.items()}
        self.numbers = numbers
        for name in self.names:
            setattr(self, name, torch.nn.Parameter(torch.ones(2)))

    def sharded_state_dict(self) -> dict[str, object]:
        """As Megatron's: entries have a key and the parameter itself, also in lists."""
        state = {
            name: SimpleNamespace(key=self._key(stored), data=getattr(self, name))
            for name, stored in self.names.items()
        }
        made = SimpleNamespace(key="made.of.it", data=torch.ones(2))
        return {"nested": [state], "made": made, "object": SimpleNamespace(key="o", data=3)}

    def _key(self, stored: str) -> str:
        return re.sub(r"(?<=\.)\d+\.", self.numbers, stored)


@pytest.mark.parametrize("numbers", ["", "9."])
def test_names(numbers: str) -> None:
    """Words come from Megatron, numbers from the canonical name, even where Megatron's differ."""
    model = Model(numbers)
    names = stored_names([model])
    assert len(names) == len(PAIRS)
    for canonical, stored in PAIRS.items():
        parameter = getattr(model, canonical.replace(".", "_"))
        assert stored_name(names[parameter], canonical) == stored
