# SPDX-License-Identifier: Apache-2.0
"""The inputs of a comparison with ``transformers``: the user's ``config.json`` and a trace.

The config describes the model. It is never derived from Megatron's arguments, which would share
their faults. Only the number of layers and the padded vocabulary are the trace's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_ttrace.saved.huggingface import modules
from megatron_ttrace.saved.huggingface.families import Family, family_of, read_config
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.records import FLOW, Kind, TraceKey
from megatron_ttrace.trace.store import TraceReader

_LAYERS, _ROWS = "num_hidden_layers", "vocab_size"
_BY_LAYER = (
    *("layer_types", "mlp_layer_types", "no_rope_layers"),
    *("layers_block_type", "hybrid_override_pattern"),
)
"""Fields of a config with one value for each layer."""
POSITIONS = 1
"""Index of the positions among the inputs of Megatron's GPTModel."""
_EMBEDDING = "embedding.word_embeddings.weight"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """A model's config, with the trace's sizes, and the tensors of the trace.

    Attributes:
        config: what the file holds, with the trace's sizes.
        replaced: values of the file that the trace's sizes replaced.
    """

    path: Path
    config: Mapping[str, Any]
    replaced: Mapping[str, Any]
    family: Family
    trace: TraceReader

    @classmethod
    def read(cls, path: Path, trace: TraceReader) -> Inputs:
        """Read a config. What can be compared is in :mod:`.differences`.

        Raises:
            TTraceError: when it is of no supported model, or the trace of no language model.
        """
        config = read_config(path)
        family = family_of(config)
        inputs = cls(path=path, config=config, replaced={}, family=family, trace=trace)
        if _EMBEDDING not in inputs.parameters():
            raise TTraceError(
                f"{trace.directory} does not hold a whole language model's parameters"
            )
        return dataclasses.replace(inputs, **inputs._resized())

    @property
    def arguments(self) -> Mapping[str, Any]:
        """Megatron's, as far as they are known."""
        return self.trace.reference.identity.get("arguments") or {}

    def parameters(self) -> dict[str, TraceKey]:
        """The parameters, and routers' biases, that the step starts from, by name."""
        return {
            key.name: key for key in self.trace if key.iteration == self.iteration and key.is_before
        }

    def correspondence(self) -> modules.Correspondence:
        """Which tensors of the model are which of the trace."""
        return modules.Correspondence(self.parameters(), self.family.rows)

    def tensors(self, keys: Mapping[str, TraceKey]) -> dict[str, torch.Tensor]:
        """Tensors of the trace in float32, by name."""
        return {name: self.trace.data(key).float() for name, key in keys.items()}

    @property
    def iteration(self) -> int:
        """The first traced step: of later ones the trace may not hold the start."""
        return min(key.iteration for key in self.trace)

    @property
    def needed_bytes(self) -> int:
        """Memory of the whole model in float32: weights, gradients, and activations."""
        count, iteration = 0, self.iteration
        for key in self.trace:
            shape = self.trace.shape(key) or ()
            if key.iteration == iteration and key.is_before:
                count += 2 * math.prod(shape)
            elif key.iteration == iteration and key.microbatch == 0 and key.kind in FLOW:
                count += math.prod(shape)
                if key.kind is Kind.INPUT and key.name.endswith("core_attention"):
                    # For each of q, k and v, [s, b, heads, d]: scores of all pairs of tokens.
                    count += math.prod(shape[:3]) * shape[0]
        return 4 * count

    def _resized(self) -> dict[str, Any]:
        names = self.parameters()
        numbers = {modules.layer_of(name) for name in names} - {None}
        sizes = {_LAYERS: len(numbers), _ROWS: self.trace.entry(names[_EMBEDDING]).shape[0]}
        if int(self.config.get(_ROWS, 0)) > sizes[_ROWS]:
            raise TTraceError(
                f"{self.path}: vocab_size {self.config[_ROWS]}, but the model in "
                f"{self.trace.directory} has {sizes[_ROWS]} rows: give both the same vocabulary"
            )
        config = {**self.config, **sizes, **self.family.without_kernels}
        for name in _BY_LAYER:
            if isinstance(values := config.get(name), list | str):
                config[name] = values[: sizes[_LAYERS]]
        replaced = {
            name: self.config.get(name)
            for name, size in sizes.items()
            if self.config.get(name, size) != size
        }
        return {"config": config, "replaced": replaced}
