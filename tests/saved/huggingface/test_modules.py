# SPDX-License-Identifier: Apache-2.0
"""Which tensor of transformers is which of Megatron's."""

import dataclasses
from collections.abc import Collection, Sequence

import pytest
import torch

from megatron_ttrace.saved.huggingface import modules
from megatron_ttrace.saved.huggingface.modules import Correspondence, Row, Rows, Sizes, Source
from megatron_ttrace.trace.records import Kind, RoutingIndex, TraceKey

SIZES = Sizes(tokens=3, groups=2, experts=4)
LAYER = "decoder.layers.1"


def key(name: str, kind: Kind = Kind.OUTPUT, index: int = 0) -> TraceKey:
    """Of the first microbatch."""
    return TraceKey(1, 0, kind, name, index)


def row_of(
    name: str,
    kind: Kind = Kind.OUTPUT,
    index: int = 0,
    *,
    parameters: Collection[str] = (),
    rows: Rows | None = None,
) -> Row:
    """The row of a tensor that has one."""
    row = Correspondence(parameters, rows).row(key(name, kind, index))
    assert row is not None
    return row


def test_queries_keys_and_values_by_group() -> None:
    """Each group has its queries, its key and its value; the sequence comes first."""
    b, s, d = 2, 3, 5
    heads = {"q": 4, "k": 2, "v": 2}
    parts = [torch.randn(b, s, count * d) for count in heads.values()]
    row = row_of(f"{LAYER}.self_attention.linear_qkv")
    assert [source.module for source in row.sources] == [
        f"model.layers.1.self_attn.{x}_proj" for x in heads
    ]
    grouped = row.layout(parts, SIZES).view(s, b, 2, 4, d)
    q, k, v = (part.view(b, s, -1, d) for part in parts)
    for group in range(2):
        assert grouped[1, 0, group, 1].equal(q[0, 1, 2 * group + 1])
        assert grouped[2, 1, group, 2].equal(k[1, 2, group])
        assert grouped[0, 1, group, 3].equal(v[1, 0, group])


def test_routers_are_in_the_order_of_tokens() -> None:
    """Weights and numbers of chosen experts become those of all experts, token by token."""
    chosen = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0], [0, 2], [1, 3]])  # b 2, s 3
    weights = torch.rand(6, 2)
    probabilities, marked, choice = (
        row_of(f"{LAYER}.mlp.router", *tensor)
        for tensor in ((Kind.OUTPUT, 0), (Kind.OUTPUT, 1), (Kind.ROUTING, RoutingIndex.CHOICE))
    )
    of_all = probabilities.layout([weights, chosen], SIZES)
    assert of_all[1].tolist() == [weights[3, 1], 0, 0, weights[3, 0]]  # position 0, sample 1
    assert marked.layout([chosen], SIZES).equal(of_all > 0)
    assert modules.by_sample(choice.layout([chosen], SIZES), SIZES).equal(chosen)


def test_the_gradient_of_what_experts_read_too() -> None:
    """Their part has no counterpart, so it is the layer's, not the router's."""
    correspondence = Correspondence(())
    assert correspondence.row(key(f"{LAYER}.mlp.router", Kind.INPUT)) is not None
    assert correspondence.row(key(f"{LAYER}.mlp.router", Kind.GRAD_INPUT)) is None
    assert correspondence.is_apart(key(f"{LAYER}.mlp.router", Kind.GRAD_INPUT))
    assert correspondence.row(key(f"{LAYER}.mlp", Kind.GRAD_INPUT)) is not None
    assert not correspondence.is_apart(key(f"{LAYER}.mlp", Kind.GRAD_INPUT))


BIAS = "mlp.linear_fc2.bias"
SOURCES: list[tuple[str, Kind, Sequence[str], Rows | None, Source]] = [
    # A module that contains the norm before it has the norm's input, else the norm's output.
    *(
        (module, Kind.GRAD_INPUT, [f"{weight}.weight"] * (not fused), rows, Source(norm, fused))
        for module, norm, weight, rows in (
            ("self_attention", "input_layernorm", "input_layernorm", None),
            ("self_attention.linear_qkv", "input_layernorm", "input_layernorm", None),
            ("mlp", "post_attention_layernorm", "pre_mlp_layernorm", None),
            ("mlp.linear_fc1", "post_attention_layernorm", "pre_mlp_layernorm", None),
            # A norm between two linear layers.
            (
                *("self_attention.linear_kv_up_proj", "self_attn.kv_a_layernorm"),
                *("self_attention.kv_layernorm", modules.LATENT),
            ),
        )
        for fused in (True, False)
    ),
    # What is in a layer of a hybrid model has one name there, whatever it is.
    ("mixer.in_proj", Kind.INPUT, ["norm.weight"], modules.HYBRID, Source("norm")),
    *(
        (module, Kind.OUTPUT, (), modules.HYBRID, source)
        for module, source in (
            ("mixer.in_proj", Source("mixer.in_proj")),
            ("self_attention.linear_proj", Source("mixer.o_proj", bare=True)),
            ("self_attention.core_attention", Source(f"mixer.{modules.ATTENTION}")),
            ("mlp.linear_fc1", Source("mixer.up_proj", bare=True)),
            ("mlp.router", Source("mixer.experts", True, 2)),
        )
    ),
    # Megatron adds the biases of linear layers later; of experts, a layer's output has them.
    *(
        (module, Kind.OUTPUT, parameters, None, Source(theirs, bare=theirs != "mlp"))
        for module, parameters, theirs in (
            ("self_attention.linear_proj", (), "self_attn.o_proj"),
            ("self_attention", (), "self_attn.o_proj"),
            ("mlp.linear_fc2", [BIAS], "mlp.down_proj"),
            ("mlp", [BIAS], "mlp.down_proj"),
            ("mlp", (), "mlp"),
        )
    ),
]


@pytest.mark.parametrize(("module", "kind", "parameters", "rows", "source"), SOURCES)
def test_sources(
    module: str, kind: Kind, parameters: Sequence[str], rows: Rows | None, source: Source
) -> None:
    """What a module's tensor is made of first."""
    names = [f"{LAYER}.{parameter}" for parameter in parameters]
    row = row_of(f"{LAYER}.{module}", kind, parameters=names, rows=rows)
    assert row.sources[0] == dataclasses.replace(source, module=f"model.layers.1.{source.module}")


def test_rows_of_a_family() -> None:
    """Names are replaced with all that is within them; rows are added or replace others."""
    frequencies = Source("model.rotary_emb.inv_freq")
    angles = Row("self_attention.rope", Kind.OUTPUT, (frequencies,))
    rows = Rows(
        names={"mlp": "block", "mlp.gate": "block.router", "model.norm": "model.last"},
        layer=(angles, Row("mlp.router", Kind.OUTPUT, (Source("mlp.x"),))),
    )
    for name, kind, theirs in (
        (f"{LAYER}.mlp.router", Kind.OUTPUT, "model.layers.1.block.x"),
        (f"{LAYER}.mlp.router", Kind.ROUTING, "model.layers.1.block.router"),
        (f"{LAYER}.mlp.linear_fc2", Kind.OUTPUT, "model.layers.1.block.down_proj"),
        ("decoder.final_layernorm", Kind.OUTPUT, "model.last"),
        (f"{LAYER}.self_attention.rope", Kind.OUTPUT, frequencies.module),
    ):
        assert row_of(name, kind, rows=rows).sources[0].module == theirs


def test_routers_with_a_bias() -> None:
    """Experts are chosen by the sigmoid of a logit plus the bias of the expert."""
    name = f"{LAYER}.mlp.router"
    row = row_of(name, Kind.ROUTING, RoutingIndex.SCORES, rows=modules.LATENT)
    logits, bias = torch.randn(2, 3, 4), torch.randn(4)  # b 2, s 3
    scores = row.layout([logits.flatten(0, 1), bias], SIZES)
    assert scores[3].equal(logits[1, 1].sigmoid() + bias)


def test_gates_of_mixers() -> None:
    """Megatron multiplies by the gate before the norm: no gradient is that of this product."""
    row = row_of(f"{LAYER}.mixer.norm", Kind.INPUT, rows=modules.HYBRID)
    scanned, gate = torch.randn(2, 2, 3, 5)  # b 2, s 3
    expected = scanned[1, 2] * gate[1, 2] * gate[1, 2].sigmoid()
    torch.testing.assert_close(row.layout([scanned, gate], SIZES)[2, 1], expected)
    correspondence = Correspondence((), modules.HYBRID)
    assert correspondence.row(key(f"{LAYER}.mixer.norm", Kind.GRAD_INPUT)) is None
    assert correspondence.row(key(f"{LAYER}.mixer.norm", Kind.GRAD_OUTPUT)) is not None


def test_angles() -> None:
    """Those of a layer's embedding are the model's."""
    model, layer = (
        row_of(name, rows=modules.LATENT)
        for name in ("rotary_pos_emb", f"{LAYER}.self_attention.rotary_pos_emb")
    )
    assert model.sources == layer.sources
    angles = layer.layout([torch.tensor([1.0, 0.5])], SIZES)
    assert angles[2, 0, 0].tolist() == [2.0, 1.0, 2.0, 1.0]


def test_what_has_no_counterpart() -> None:
    """Experts one by one, the optimizer, and whatever is not in the table."""
    correspondence = Correspondence(())
    for name in (f"{LAYER}.mlp.experts", f"{LAYER}.mlp.experts.linear_fc1", "vision.layers.0"):
        assert correspondence.row(key(name)) is None
    assert correspondence.row(key(f"{LAYER}", Kind.EXP_AVG)) is None
    assert correspondence.row(key(f"{LAYER}", Kind.INPUT, 4)) is None


def test_scores_or_probabilities() -> None:
    """Only what sums to 1 in each row is taken for probabilities."""
    scores = key(f"{LAYER}.mlp.router", Kind.ROUTING, RoutingIndex.SCORES)
    logits = torch.randn(6, 4)
    assert not modules.is_of_probabilities(scores, logits)
    assert modules.is_of_probabilities(scores, logits.softmax(-1))
    assert not modules.is_of_probabilities(key("x"), logits.softmax(-1))
