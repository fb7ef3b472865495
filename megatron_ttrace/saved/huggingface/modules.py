# SPDX-License-Identifier: Apache-2.0
"""Which tensor of a ``transformers`` model is which tensor of a Megatron trace.

A row joins an input or output of one of Megatron's modules to the inputs or outputs of modules of
``transformers``, and says how the latter are laid out as Megatron has them. A layout that is a
permutation of elements holds for gradients too.

Shapes: ``b`` samples, ``s`` tokens of each, ``h`` hidden size, ``d`` size of a head.
"""

import dataclasses
import re
from collections.abc import Callable, Container, Mapping, Sequence

import torch

from megatron_ttrace.trace.records import ROOT, Kind, RoutingIndex, TraceKey

ATTENTION = "<attention>"
"""The function in a module of attention: q, k, v after RoPE, and its result."""
LOSS = "<loss>"
"""The loss of each token, [b, s]."""


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """An input (``is_input``) or output of a module of ``transformers``, or a buffer.

    Of a linear layer that is ``bare`` the output before its bias is added, which is what Megatron's
    layer returns (``skip_bias_add``).
    """

    module: str
    is_input: bool = False
    index: int = 0
    bare: bool = False


def _in(module: str, index: int = 0) -> Source:
    return Source(module, True, index)


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """What a layout needs.

    Tokens of a sample, groups of attention heads that share a key, and experts.
    """

    tokens: int
    groups: int
    experts: int


Layout = Callable[[Sequence[torch.Tensor], Sizes], torch.Tensor]


def _same(parts: Sequence[torch.Tensor], sizes: Sizes) -> torch.Tensor:
    return parts[0]


def _sequence_first(parts: Sequence[torch.Tensor], sizes: Sizes) -> torch.Tensor:
    """[b, s, ...] parts of the last dim, joined to [s, b, ...]."""
    return torch.cat([*parts], dim=-1).transpose(0, 1)


def _heads(parts: Sequence[torch.Tensor], sizes: Sizes) -> torch.Tensor:
    """[b, heads, s, d] to [s, b, heads, d]."""
    return parts[0].permute(2, 0, 1, 3)


def _context(parts: Sequence[torch.Tensor], sizes: Sizes) -> torch.Tensor:
    """[b, s, heads, d] to [s, b, heads * d]."""
    return parts[0].transpose(0, 1).flatten(2)


def _by_group(parts: Sequence[torch.Tensor], sizes: Sizes) -> torch.Tensor:
    """Queries, keys and values, each [b, s, heads * d], to [s, b, groups * (queries, key, value)].

    As ``linear_qkv`` of megatron/core/transformer/attention.py orders them.
    """
    grouped = [part.transpose(0, 1).unflatten(2, (sizes.groups, -1)) for part in parts]
    return torch.cat(grouped, dim=-1).flatten(2)


def _unfolded(parts: Sequence[torch.Tensor], sizes: Sizes) -> torch.Tensor:
    """[b * s, ...] to [s, b, ...]."""
    return parts[0].reshape(-1, sizes.tokens, parts[0].shape[-1]).transpose(0, 1)


def _token_order(parts: Sequence[torch.Tensor], sizes: Sizes) -> torch.Tensor:
    """[b * s, ...] to [s * b, ...]."""
    return _unfolded(parts, sizes).flatten(0, 1)


def by_sample(data: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """[s * b, ...] to [b * s, ...]."""
    return data.reshape(sizes.tokens, -1, data.shape[-1]).transpose(0, 1).flatten(0, 1)


def _of_all(parts: Sequence[torch.Tensor], sizes: Sizes) -> torch.Tensor:
    """The chosen experts' weights, and their numbers, to weights of all experts."""
    weights, chosen = (_token_order([part], sizes) for part in parts)
    return weights.new_zeros(len(weights), sizes.experts).scatter(1, chosen.long(), weights)


def _map(parts: Sequence[torch.Tensor], sizes: Sizes) -> torch.Tensor:
    """The chosen experts' numbers to a map of all experts."""
    chosen = _token_order(parts, sizes).long()
    none = torch.zeros(len(chosen), sizes.experts, dtype=torch.bool)
    return none.scatter(1, chosen, value=True)


def _biased_sigmoid(parts: Sequence[torch.Tensor], sizes: Sizes) -> torch.Tensor:
    """Logits, [b * s, experts], and the bias of each expert to the scores that they are chosen by.

    As ``topk_routing_with_score_function`` of megatron/core/transformer/moe/moe_utils.py has them.
    """
    return _token_order(parts, sizes).sigmoid() + parts[1]


def _multiplied(parts: Sequence[torch.Tensor], sizes: Sizes) -> torch.Tensor:
    """What a Mamba mixer's scan returns, and its gate, to what Megatron normalises."""
    return _sequence_first([parts[0] * torch.nn.functional.silu(parts[1])], sizes)


def _angles(parts: Sequence[torch.Tensor], sizes: Sizes) -> torch.Tensor:
    """Inverse frequencies, [d / 2], to the angle of each position, [s, 1, 1, d]."""
    angles = torch.outer(torch.arange(sizes.tokens).float(), parts[0])
    return torch.cat((angles, angles), dim=-1)[:, None, None]


def _angles_of_each(parts: Sequence[torch.Tensor], sizes: Sizes) -> torch.Tensor:
    """[parts, s, 1, 1, d]."""
    return torch.stack([_angles([part], sizes) for part in parts])


def _unscaled(parts: Sequence[torch.Tensor], sizes: Sizes) -> torch.Tensor:
    return parts[0] / parts[1]


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A tensor of one of Megatron's modules.

    Attributes:
        module: its name, within a layer or in the model.
        kind: ``INPUT``, ``OUTPUT`` or ``ROUTING``.
        sources: what it is made of. Within a layer their modules are the layer's too, unless
            their names begin with ``model.``.
        has_gradient: whether gradients correspond too: the layout is a permutation, and nothing
            without a counterpart reads the tensor, whose gradient would be in the sum.
    """

    module: str
    kind: Kind
    sources: tuple[Source, ...]
    layout: Layout = _sequence_first
    index: int = 0
    has_gradient: bool = True


_NORM_1, _NORM_2 = "input_layernorm", "post_attention_layernorm"
_OUT = Source("self_attn.o_proj", bare=True)
_CORE = f"self_attn.{ATTENTION}"
_GATE = "mlp.gate"
_QKV = tuple(Source(f"self_attn.{name}_proj") for name in "qkv")
_FREQUENCIES = Source("model.rotary_emb.inv_freq")


def _through(ours: str, source: Source, theirs: str) -> tuple[Row, ...]:
    return Row(ours, Kind.INPUT, (source,)), Row(ours, Kind.OUTPUT, (Source(theirs),))


def _mlp(ours: str, theirs: str, first: tuple[str, ...] = ("gate", "up")) -> tuple[Row, ...]:
    parts = tuple(Source(f"{theirs}.{name}_proj", bare=True) for name in first)
    return (
        Row(ours, Kind.INPUT, (Source(_NORM_2),)),
        Row(f"{ours}.linear_fc1", Kind.INPUT, (Source(_NORM_2),)),
        Row(f"{ours}.linear_fc1", Kind.OUTPUT, parts),
        Row(f"{ours}.linear_fc2", Kind.INPUT, (_in(f"{theirs}.down_proj"),)),
        Row(f"{ours}.linear_fc2", Kind.OUTPUT, (Source(f"{theirs}.down_proj", bare=True),)),
        Row(ours, Kind.OUTPUT, (Source(theirs),)),
    )


def _router(
    scores: tuple[Source, ...], layout: Layout, weights: Source, chosen: Source
) -> tuple[Row, ...]:
    return (
        # The experts read it as well.
        Row("mlp.router", Kind.INPUT, (Source(_NORM_2),), has_gradient=False),
        Row("mlp.router", Kind.ROUTING, scores, layout, RoutingIndex.SCORES),
        Row("mlp.router", Kind.ROUTING, (chosen,), _token_order, RoutingIndex.CHOICE),
        Row("mlp.router", Kind.OUTPUT, (weights, chosen), _of_all),
        Row("mlp.router", Kind.OUTPUT, (chosen,), _map, 1),
    )


MODEL = (
    Row("embedding.word_embeddings", Kind.OUTPUT, (Source("model.embed_tokens"),), _same),
    Row("embedding", Kind.OUTPUT, (Source("model.embed_tokens"),)),
    Row("rotary_pos_emb", Kind.OUTPUT, (_FREQUENCIES,), _angles),
    *_through("decoder.final_layernorm", _in("model.norm"), "model.norm"),
    *_through("decoder.final_norm", _in("model.norm"), "model.norm"),
    *_through("output_layer", _in("lm_head"), "lm_head"),
    Row(ROOT, Kind.OUTPUT, (Source(LOSS),), _same),
)
LAYER = (
    *_through("", _in(""), ""),
    *_through("input_layernorm", _in(_NORM_1), _NORM_1),
    Row("self_attention", Kind.INPUT, (Source(_NORM_1),)),
    Row("self_attention.linear_qkv", Kind.INPUT, (Source(_NORM_1),)),
    Row("self_attention.linear_qkv", Kind.OUTPUT, _QKV, _by_group),
    *_through("self_attention.q_layernorm", _in("self_attn.q_norm"), "self_attn.q_norm"),
    *_through("self_attention.k_layernorm", _in("self_attn.k_norm"), "self_attn.k_norm"),
    *(
        Row("self_attention.core_attention", Kind.INPUT, (_in(_CORE, index),), _heads, index)
        for index in range(3)
    ),
    Row("self_attention.core_attention", Kind.OUTPUT, (Source(_CORE),), _context),
    Row("self_attention.linear_proj", Kind.INPUT, (_in("self_attn.o_proj"),)),
    Row("self_attention.linear_proj", Kind.OUTPUT, (_OUT,)),
    Row("self_attention", Kind.OUTPUT, (_OUT,)),
    *_through("pre_mlp_layernorm", _in(_NORM_2), _NORM_2),
    *_mlp("mlp", "mlp"),
    *_mlp("mlp.shared_experts", "mlp.shared_experts"),
    *_router((Source(_GATE),), _token_order, Source(_GATE, index=1), Source(_GATE, index=2)),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """How a family differs from :data:`MODEL` and :data:`LAYER`.

    Attributes:
        names: of modules that the family calls differently, by those in the tables. What is within
            them follows.
        model: rows outside of layers that are added, or replace those of the table.
        layer: likewise within a layer.
        norms: of a layer, by the names in the table; parameters of Megatron's that are theirs
            alone. A model that has none of these has the norm in the module behind it.
    """

    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    model: tuple[Row, ...] = ()
    layer: tuple[Row, ...] = ()
    norms: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    def renamed(self, module: str) -> str:
        """The family's name of a module in the tables."""
        parts = module.split(".")
        for count in range(len(parts), 0, -1):
            if (name := self.names.get(".".join(parts[:count]))) is not None:
                return ".".join([name, *parts[count:]])
        return module


_NORMS = {_NORM_1: ("input_layernorm.weight",), _NORM_2: ("pre_mlp_layernorm.weight",)}

_BIASED_ROUTER = _router(
    (Source(_GATE), Source(f"{_GATE}.e_score_correction_bias")),
    _biased_sigmoid,
    *(_in("mlp.experts", index) for index in (2, 1)),
)
"""Of routers that add a bias to the sigmoid of a score."""
_Q_NORM, _KV_NORM = "self_attn.q_a_layernorm", "self_attn.kv_a_layernorm"
LATENT = Rows(
    layer=(
        Row("self_attention.rotary_pos_emb", Kind.OUTPUT, (_FREQUENCIES,), _angles),
        *_through("self_attention.linear_q_proj", Source(_NORM_1), "self_attn.q_proj"),
        *_through("self_attention.linear_q_down_proj", Source(_NORM_1), "self_attn.q_a_proj"),
        *_through(
            "self_attention.linear_kv_down_proj", Source(_NORM_1), "self_attn.kv_a_proj_with_mqa"
        ),
        *_through("self_attention.q_layernorm", _in(_Q_NORM), _Q_NORM),
        *_through("self_attention.kv_layernorm", _in(_KV_NORM), _KV_NORM),
        *_through("self_attention.linear_q_up_proj", Source(_Q_NORM), "self_attn.q_b_proj"),
        *_through("self_attention.linear_kv_up_proj", Source(_KV_NORM), "self_attn.kv_b_proj"),
        *_BIASED_ROUTER,
    ),
    norms={
        _Q_NORM: ("self_attention.q_layernorm.weight",),
        _KV_NORM: ("self_attention.kv_layernorm.weight",),
    },
)
"""Multi-latent attention."""
_DOWN, _UP = "mlp.fc1_latent_proj", "mlp.fc2_latent_proj"
_SCANNED = _in("mixer.norm"), _in("mixer.norm", 1)
HYBRID = Rows(
    names={
        **dict.fromkeys(("self_attn", "mlp"), "mixer"),
        **dict.fromkeys((_NORM_1, _NORM_2), "norm"),
        "model.embed_tokens": "model.embeddings",
        "model.norm": "model.norm_f",
    },
    layer=(
        *_through("norm", _in(_NORM_1), _NORM_1),
        *_through("mixer", Source(_NORM_1), "mixer"),
        *_through("mixer.in_proj", Source(_NORM_1), "mixer.in_proj"),
        Row("mixer.norm", Kind.INPUT, _SCANNED, _multiplied, has_gradient=False),
        Row("mixer.norm", Kind.OUTPUT, (Source("mixer.norm"),)),
        *_through("mixer.out_proj", _in("mixer.out_proj"), "mixer.out_proj"),
        *_mlp("mlp", "mlp", ("up",)),
        *_mlp("mlp.shared_experts", "mlp.shared_experts", ("up",)),
        Row(_DOWN, Kind.INPUT, (Source(_NORM_2),)),
        Row(_DOWN, Kind.OUTPUT, (Source(_DOWN),), _unfolded),
        Row(_UP, Kind.INPUT, (_in(_UP),), _unfolded),
        Row(_UP, Kind.OUTPUT, (Source(_UP),), _unfolded),
        *_BIASED_ROUTER,
    ),
    norms={_NORM_1: ("input_layernorm.weight", "norm.weight")},
)
"""One of a Mamba mixer, attention, an MLP and experts in each layer, all of one name."""
_NORM_3, _NORM_4 = "pre_feedforward_layernorm", "post_feedforward_layernorm"
_EMBEDDED = Source("model.embed_tokens"), Source("model.embed_tokens.embed_scale")
SANDWICH = Rows(
    model=(
        Row("embedding.word_embeddings", Kind.OUTPUT, _EMBEDDED, _unscaled, has_gradient=False),
        Row(
            "rotary_pos_emb",
            Kind.OUTPUT,
            tuple(Source(f"model.rotary_emb.{x}_attention_inv_freq") for x in ("sliding", "full")),
            _angles_of_each,
        ),
    ),
    layer=(
        *(
            Row(f"self_attention.{x}_layernorm", kind, (Source(f"self_attn.{x}_norm", at),), _heads)
            for x in "qk"
            for kind, at in ((Kind.INPUT, True), (Kind.OUTPUT, False))
        ),
        *_through("mlp", Source(_NORM_3), _NORM_4),
        Row("mlp.linear_fc1", Kind.INPUT, (Source(_NORM_3),)),
        Row("mlp.linear_fc2", Kind.OUTPUT, (Source(_NORM_4),)),
        Row("self_attention.linear_proj", Kind.OUTPUT, (Source(_NORM_2),)),
        Row("self_attention", Kind.OUTPUT, (Source(_NORM_2),)),
    ),
    norms={_NORM_3: ("pre_mlp_layernorm.weight",)},
)
"""Norms before and after attention and MLP, in the linear layers of Megatron-Bridge."""

_LAYER_NAME = re.compile(r"(?:decoder|model)\.layers\.(\d+)(?:\.|$)")
_VALUES = {Kind.GRAD_OUTPUT: Kind.OUTPUT, Kind.GRAD_INPUT: Kind.INPUT}


def layer_of(name: str) -> int | None:
    """The number of the layer that a module or parameter of either model is in."""
    match = _LAYER_NAME.match(name)
    return int(match[1]) if match else None


class Correspondence:
    """The rows that apply to a trace.

    ``parameters`` are the names of Megatron's: where a norm has none of its own, the module behind
    it contains the norm, and has the norm's input. ``rows`` are a family's.
    """

    def __init__(self, parameters: Container[str], rows: Rows | None = None) -> None:
        self._parameters = parameters
        self._rows = rows or Rows()
        self._model = _indexed((*MODEL, *self._rows.model))
        self._layer = _indexed((*LAYER, *self._rows.layer))
        self._norms = {**_NORMS, **self._rows.norms}

    def row(self, key: TraceKey) -> Row | None:
        """The row of a tensor, with full names of the modules it is made of; ``None`` without."""
        row, number = self._found(key), layer_of(key.name)
        if row is None or self.is_apart(key):
            return None
        sources = (self._source(source, row.kind, number) for source in row.sources)
        return dataclasses.replace(row, sources=tuple(sources))

    def is_apart(self, key: TraceKey) -> bool:
        """Whether it is a gradient without counterpart of a tensor that has one."""
        row = self._found(key)
        return row is not None and not row.has_gradient and key.kind is not row.kind

    def _found(self, key: TraceKey) -> Row | None:
        place = _VALUES.get(key.kind, key.kind), key.index
        number, name = layer_of(key.name), _LAYER_NAME.sub("", key.name)
        if place == (Kind.OUTPUT, 0) and f"{key.name}.linear_fc2.bias" in self._parameters:
            name = f"{name}.linear_fc2"  # an MLP returns what its last layer does
        return (self._model if number is None else self._layer).get((name, *place))

    def _source(self, source: Source, kind: Kind, number: int | None) -> Source:
        name, is_input = self._rows.renamed(source.module), source.is_input
        if number is None or source.module.startswith("model."):
            return dataclasses.replace(source, module=name)
        if kind is Kind.INPUT and (weights := self._norms.get(source.module)):
            at = f"decoder.layers.{number}."
            is_input |= not any(at + weight in self._parameters for weight in weights)
        name = f"model.layers.{number}.{name}".rstrip(".")
        return dataclasses.replace(source, module=name, is_input=is_input)


def _indexed(rows: Sequence[Row]) -> Mapping[tuple[str, Kind, int], Row]:
    return {(row.module, row.kind, row.index): row for row in rows}


def is_of_probabilities(key: TraceKey, data: torch.Tensor) -> bool:
    """Whether these scores of a router are probabilities; logits give experts the same order."""
    if (key.kind, key.index) != (Kind.ROUTING, RoutingIndex.SCORES):
        return False
    sums = data.double().sum(dim=-1)
    return bool((data >= 0).all()) and torch.allclose(sums, torch.ones_like(sums), atol=0.02)
