# SPDX-License-Identifier: Apache-2.0
"""Weights of Megatron's models by the names of transformers', and the other way round.

Each tensor of Megatron's is a permutation of the rows of one or a few tensors of transformers, so
one table (:mod:`.families`) converts both ways. transformers is not needed: all sizes are in the
model's ``config.json``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from megatron_ttrace.saved.huggingface.families import (
    EMBEDDING,
    HEAD,
    Config,
    Family,
    Order,
    Part,
    Rule,
    Where,
)
from megatron_ttrace.saved.recorded import same
from megatron_ttrace.trace.errors import TTraceError

_MOST = 1 << 24
_PREFIX = "model."
_MOST_MODULES = 1 << 20
"""Layers times experts."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """What the table needs of a config.

    Attributes:
        heads, groups, head: numbers of query heads and of key and value heads, and rows of each.
        experts: their number in layers that have them.
        tied: whether the head is the embedding.
        kinds: of each layer, the parts of the model that it belongs to.
    """

    layers: int
    heads: int
    groups: int
    head: int
    experts: int
    vocabulary: int
    tied: bool
    kinds: tuple[frozenset[Where], ...]

    @classmethod
    def of(cls, config: Config, defaults: Config) -> Sizes:
        """The sizes in a config.

        Raises:
            TTraceError: when one is absent or not a positive number.
        """
        config = {**defaults, **{k: v for k, v in config.items() if v is not None}}

        def number(*names: str, default: int | None = None) -> int:
            value = next((config[name] for name in names if name in config), default)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST:
                raise TTraceError(f"config.json: {names[0]} is {value!r}, not a number")
            return value

        heads = number("num_attention_heads")
        mixed = _mixed(config)
        layers = len(mixed) or number("num_hidden_layers")
        head = number("head_dim", default=number("hidden_size") // max(heads, 1))
        experts = number("num_local_experts", "num_experts", "n_routed_experts", default=0)
        if layers * max(experts, 1) > _MOST_MODULES:
            raise TTraceError(f"config.json: {layers} layers with {experts} experts are too many")
        if not isinstance(dense := config.get("mlp_only_layers", ()), list | tuple):
            raise TTraceError(f"config.json: mlp_only_layers is {dense!r}, not a list")
        first = number("first_k_dense_replace", default=0)
        step = number("decoder_sparse_step", default=1)
        sparse = (
            bool(experts) and n not in dense and n >= first and (n + 1) % max(step, 1) == 0
            for n in range(layers)
        )
        kinds = mixed or (
            frozenset({Where.LAYER, Where.ATTENTION, Where.SPARSE if is_sparse else Where.DENSE})
            for is_sparse in sparse
        )
        groups = number("num_key_value_heads", default=heads)
        tied = config.get("tie_word_embeddings", False) is True
        vocabulary = number("vocab_size")
        if not groups or heads % groups:
            raise TTraceError(f"config.json: {heads} heads cannot share {groups} key-value heads")
        return cls(layers, heads, groups, head, experts, vocabulary, tied, tuple(kinds))

    def layers_of(self, where: Where) -> Collection[int | None]:
        """The numbers of the layers in a part of the model; of the whole model ``None``."""
        if where is Where.MODEL:
            return (None,)
        return [layer for layer, kinds in enumerate(self.kinds) if where in kinds]


_MIXED = {
    **dict.fromkeys(("M", "mamba"), Where.MAMBA),
    **dict.fromkeys(("*", "attention"), Where.ATTENTION),
    **dict.fromkeys(("-", "mlp"), Where.DENSE),
    **dict.fromkeys(("E", "moe"), Where.SPARSE),
}


def _mixed(config: Config) -> tuple[frozenset[Where], ...]:
    """The kinds of the layers of a hybrid model; of other models none."""
    layers = config.get("layers_block_type") or config.get("hybrid_override_pattern") or ()
    try:
        return tuple(frozenset({Where.LAYER, _MIXED[layer]}) for layer in layers)
    except (KeyError, TypeError) as error:
        raise TTraceError(f"config.json: there is no kind of layers {error}") from error


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """A tensor of Megatron's and the parts that it is made of.

    Attributes:
        layer, expert: their numbers in the whole model.
    """

    megatron: str
    parts: tuple[Part, ...]
    rule: Rule
    layer: int | None
    expert: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """All tensors of a model.

    Attributes:
        pairs: in the order of the family's rules.
        missing: likewise, but Megatron's model lacks them; their names are only one of several.
    """

    sizes: Sizes
    pairs: tuple[Pair, ...]
    missing: tuple[Pair, ...]

    @classmethod
    def of(
        cls,
        family: Family,
        config: Config,
        megatron: Callable[[str], bool],
        hf: Callable[[str], bool] | None = None,
    ) -> Table:
        """The table for a model.

        ``megatron`` and ``hf`` tell whether either model has a tensor of a name. Without ``hf``,
        transformers' names are those in memory.

        Raises:
            TTraceError: when a size is absent.
        """
        sizes = Sizes.of(config, family.defaults)
        values = {**family.defaults, **config}
        pairs: list[Pair] = []
        missing: list[Pair] = []
        for rule in family.rules:
            if (rule.needs and not values.get(rule.needs)) or values.get(rule.unless):
                continue
            for layer in sizes.layers_of(rule.where):
                is_of_expert = "{expert}" in rule.megatron[0]
                for expert in range(sizes.experts) if is_of_expert else (None,):
                    names = [_named(name, "decoder", layer, expert) for name in rule.megatron]
                    tied = rule is HEAD and sizes.tied
                    parts = _parts(family, EMBEDDING if tied else rule, layer, expert, hf)
                    name = next(filter(megatron, names), None)
                    pair = Pair(name or names[0], parts, rule, layer, expert)
                    if name or not tied:
                        (pairs if name else missing).append(pair)
        return cls(sizes, tuple(pairs), tuple(missing))

    def join(self, pair: Pair, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Megatron's tensor, without padding, from ``pair.parts`` as transformers has them.

        Raises:
            TTraceError: when the number of rows is not the config's.
        """
        pairs = zip(pair.parts, parts, strict=True)
        turned = [data.T if part.transposed else data for part, data in pairs]
        joined = torch.cat(turned) if len(turned) > 1 else turned[0]
        order = self.order(pair, len(joined))
        return joined if order is None else joined[order]

    def split(self, pair: Pair, data: torch.Tensor) -> list[torch.Tensor]:
        """The inverse of :meth:`join`; rows appended to the vocabulary are cut off."""
        if pair.rule.padded:
            if len(data) < self.sizes.vocabulary:
                raise _wrong_rows(pair.megatron, len(data), self.sizes.vocabulary)
            data = data[: self.sizes.vocabulary]
        if (order := self.order(pair, len(data))) is not None:
            joined = torch.empty_like(data)
            joined[order] = data
            data = joined
        if pair.rule.order is Order.GROUPS:
            rows = (self.sizes.heads, self.sizes.groups, self.sizes.groups)
            parts = data.split([count * self.sizes.head for count in rows])
        else:
            parts = data.tensor_split(len(pair.parts))
        return [
            data.T.contiguous() if part.transposed else data
            for part, data in zip(pair.parts, parts, strict=True)
        ]

    def order(self, pair: Pair, rows: int) -> torch.Tensor | None:
        """The row of the joined parts that is in each row of Megatron's tensor; ``None``: its own.

        Raises:
            TTraceError: when the number of rows is not the config's.
        """
        if pair.rule.order is Order.GROUPS:
            heads, groups, head = self.sizes.heads, self.sizes.groups, self.sizes.head
            if rows != (wanted := (heads + 2 * groups) * head):
                raise _wrong_rows(pair.megatron, rows, wanted)
            order = torch.arange(rows)
            parts = order.split([heads * head, groups * head, groups * head])
            return torch.cat([part.view(groups, -1) for part in parts], 1).flatten()
        if rows % len(pair.parts):
            raise _wrong_rows(pair.megatron, rows, rows + rows % len(pair.parts))
        if pair.rule.order is Order.ALTERNATING:
            return torch.arange(rows).view(-1, 2).T.flatten()
        return None


def _wrong_rows(name: str, rows: int, wanted: int) -> TTraceError:
    return TTraceError(f"{name} has {rows} rows, by config.json it needs {wanted}")


def _named(name: str, prefix: str, layer: int | None, expert: int | None) -> str:
    name = name.format(expert=expert)
    return name if layer is None else f"{prefix}.layers.{layer}.{name}"


def _parts(
    family: Family,
    rule: Rule,
    layer: int | None,
    expert: int | None,
    hf: Callable[[str], bool] | None,
) -> tuple[Part, ...]:
    """The parts of a rule: the alternative that is there, else the last, which files have."""
    prefixes = dict.fromkeys((_PREFIX, family.stored))
    for parts, prefix in itertools.product(rule.hf, prefixes):
        named = tuple(
            dataclasses.replace(
                part,
                name=_named(family.rows.renamed(part.name), "model", layer, expert).replace(
                    _PREFIX, prefix, 1
                ),
                expert=None if part.expert is None else expert,
            )
            for part in parts
        )
        if hf is None or any(hf(part.name) for part in named):
            break
    return named


def load_weights(
    family: Family, config: Config, megatron: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The state dict of transformers' model, or of some of its layers, from whole tensors.

    The gradients of parameters can be converted likewise. A tied head has its own name in state
    dicts, and is there if it is the embedding.

    The tensors in ``megatron`` have canonical names, or those of a checkpoint, with the numbers of
    layers and experts. Padded rows are kept if the config has the padded size of the vocabulary.

    Raises:
        TTraceError: when a tensor has another number of rows.
    """
    table = Table.of(family, config, megatron.__contains__)
    state: dict[str, torch.Tensor] = {}
    stacks: dict[str, list[torch.Tensor]] = {}
    for pair in table.pairs:
        parts = table.split(pair, megatron[pair.megatron])
        for part, data in zip(pair.parts, parts, strict=True):
            if part.expert is not None:
                stacks.setdefault(part.name, []).append(data)
            elif not same(state.setdefault(part.name, data), data):
                raise TTraceError(f"{pair.megatron} is not {part.name}, which config.json ties")
    if table.sizes.tied and "model.embed_tokens.weight" in state:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    return state | {name: torch.stack(parts) for name, parts in stacks.items()}


def megatron_weights(
    family: Family,
    config: Config,
    state: Mapping[str, torch.Tensor],
    names: Collection[str],
) -> dict[str, torch.Tensor]:
    """The inverse of :func:`load_weights`, without padding, for Megatron's tensors of these names.

    Raises:
        TTraceError: when a tensor is absent or has another number of rows.
    """
    table = Table.of(family, config, names.__contains__, state.__contains__)
    tensors = {}
    for pair in table.pairs:
        if absent := [part.name for part in pair.parts if part.name not in state]:
            raise TTraceError(f"the model of transformers has no {absent[0]}")
        parts = [
            state[part.name] if part.expert is None else state[part.name][part.expert]
            for part in pair.parts
        ]
        tensors[pair.megatron] = table.join(pair, parts)
    return tensors


def require_complete(family: Family, config: Config, megatron: Collection[str]) -> None:
    """Compare the names of all tensors.

    Raises:
        TTraceError: when a tensor of either model has no counterpart.
    """
    table = Table.of(family, config, megatron.__contains__)
    if table.missing:
        first = table.missing[0]
        instead = f": train it with {first.rule.option}" if first.rule.option else ""
        raise TTraceError(
            f"Megatron's model has no counterpart of {first.parts[0].name} ({family.architecture}; "
            f"{len(table.missing)} such tensors){instead}"
        )
    if extra := set(megatron) - {pair.megatron for pair in table.pairs}:
        raise TTraceError(
            f"{family.architecture} has no counterpart of Megatron's {min(extra)} "
            f"({len(extra)} such tensors)"
        )
