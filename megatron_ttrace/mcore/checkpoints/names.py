# SPDX-License-Identifier: Apache-2.0
"""What a distributed checkpoint calls the parameters and buffers of a model.

Megatron's ``sharded_state_dict()`` names them; the names follow TransformerEngine's modules,
whatever the model is built of. Only the words are taken from it: numbers of layers and experts come
from the canonical name (``mcore/names.py``), because what is under test must not say where to look.
"""

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from megatron_ttrace.mcore.names import unwrap

_NUMBERS = re.compile(r"(?<=layers\.)\d+\.|(?<=experts\.experts\.)\d+\.")
_LAYER = re.compile(r"layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\..*?(?:local_experts\.(\d+)\.|(?:weight|bias)(\d+)$)")


def stored_names(chunks: Iterable[torch.nn.Module]) -> dict[torch.Tensor, str]:
    """The stored name of each parameter and buffer, without numbers of layers and experts.

    Not of those that are stored as something made of them (a fused weight in two parts), and not
    needed in a format of FSDP (``fsdp_dtensor``), where stored names are canonical ones.
    """
    names: dict[torch.Tensor, str] = {}
    for chunk in chunks:
        model: Any = unwrap(chunk)
        tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        # ``ShardedTensor`` and ``ShardedTensorFactory`` have a key and data.
        for leaf in tree_leaves(model.sharded_state_dict()):
            if (tensor := tensors.get(id(getattr(leaf, "data", None)))) is not None:
                names[tensor] = _NUMBERS.sub("", leaf.key)
    return names


def stored_name(name: str, canonical: str) -> str:
    """One of :func:`stored_names`, with the numbers of layer and expert, for ``Checkpoint.find``.

    ``canonical`` is the canonical name of the same parameter.
    """
    for layer in _LAYER.findall(canonical):
        name = re.sub(r"layers\.(?!\d)", f"layers.{layer}.", name, count=1)
    if match := _EXPERT.search(canonical):
        name = name.replace(".experts.experts.", f".experts.experts.{match[1] or match[2]}.", 1)
    return name
