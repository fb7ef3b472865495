# SPDX-License-Identifier: Apache-2.0
"""What a canonical name says about the module that a tensor belongs to.

Other rooms ask here, so that Megatron's names are known in one room.
"""

import re

from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.trace.modules import module_of
from megatron_ttrace.trace.records import Kind, TraceKey

INNER_ATTENTION = "core_attention"
"""The attention between the projections."""

HEAD = "output_layer"
"""From hidden states to logits."""

LOOKED_UP = {"word_embeddings": 0, "position_embeddings": 1}
"""Tables of an embedding, and the index of the model's input that they are looked up by."""

_ADAPTER = "adapter"

STATE_SPACE = {
    "A_log": ((0.5, 0.5), (1.9, 0.7)),
    "dt_bias": ((-2.0, 0.5), (-4.6, 1.3)),
    "D": ((0.1, 0.04), (1.0, 0.0)),
}
"""Parameters of Mamba layers and gated delta nets, by the last part of their name: mean and
standard deviation of start values that reveal faults (a state is carried over some five tokens, and
is as large as the direct share), and of Megatron's own (megatron/core/ssm/mamba_mixer.py)."""

FOLLOWED = ("alltoall", "allgather")
"""Dispatchers (``--moe-token-dispatcher-type``) that can also send other data than activations."""

_PARTIAL = {
    Kind.OUTPUT: ("", "linear_fc2", "linear_fc2.to_wrap", "quantization_unpadding"),
    Kind.INPUT: ("quantization_unpadding",),
    Kind.GRAD_INPUT: ("", "linear_fc1", "linear_fc1.to_wrap", "quantization_padding"),
    Kind.GRAD_OUTPUT: ("quantization_padding",),
}

_SHARED = ("word_embeddings.weight", "output_layer.weight")
_NUMBERED_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+|(?<=\.experts\.linear_fc[12]\.weight)\d+")
_NUMBERED_LAYER = re.compile(r"(?<=\blayers\.)\d+")
_ONE_BY_ONE = "local_experts."


def is_within_experts(name: str) -> bool:
    """Whether a tensor is inside a layer's experts, which have their own numbering of ranks."""
    return ".experts." in f".{name}."


def names_tokens(key: TraceKey) -> bool:
    """Whether it says which tokens arrive at experts, and is no router's choice."""
    return key.kind is Kind.ROUTING and key.name.endswith("experts")


def selects_keys(key: TraceKey) -> bool:
    """Whether a choice is sparse attention's, of keys for each token, and not a router's."""
    return key.kind is Kind.ROUTING and module_of(key.name).endswith(INNER_ATTENTION)


def is_beyond(key: TraceKey, mesh: Mesh, dispatcher: str) -> bool:
    """Whether ``key`` lies in distributed experts whose dispatcher cannot be followed."""
    spread = mesh.size("ep") > 1 or mesh.size("etp") > 1
    return (
        spread
        and dispatcher not in FOLLOWED
        and key.microbatch >= 0
        and is_within_experts(key.name)
    )


def is_shared_embedding(name: str) -> bool:
    """Whether the first and the last pipeline stage can hold copies of a weight."""
    return name.endswith(_SHARED)


def is_of_adapter(parameter: str) -> bool:
    """Whether a parameter belongs to an adapter of a layer (megatron/bridge/peft)."""
    return _ADAPTER in parameter.split(".")


def expert_and_module(within: str) -> tuple[int | None, str]:
    """The expert's number, and the module in it, for a name within the experts of a layer.

    Experts that are computed together have no number (``None``).
    """
    if not within.startswith(_ONE_BY_ONE):
        return None, within
    number, _, module = within.removeprefix(_ONE_BY_ONE).partition(".")
    return int(number), module


def without_number(name: str) -> str:
    """A parameter's name without the number of its expert."""
    return _NUMBERED_EXPERT.sub("*", name)


def any_layer(name: str) -> str:
    """A tensor's or module's name without the numbers of its layer and its expert."""
    return _NUMBERED_LAYER.sub("*", without_number(name))


def is_partial(kind: Kind, module: str) -> bool:
    """Whether a tensor is partial on each rank of expert tensor parallelism.

    The dispatcher reduce-scatters the output of the second linear layer, and the gradient of the
    input that was gathered for the first (``explicit_expert_comm`` in
    megatron/core/tensor_parallel/layers.py). With FP8, padding is added before
    the first and removed after the second (``quantization_padding`` in
    megatron/core/transformer/moe/experts.py).

    Args:
        kind: of the tensor.
        module: its name within the experts, without an expert's number: ``""`` for the experts as
            a whole and for one expert, ``linear_fc1``, ``linear_fc2``, ...
    """
    return module in _PARTIAL.get(kind, ())
