# SPDX-License-Identifier: Apache-2.0
"""Layers that stack unequal blocks."""

from types import SimpleNamespace

import torch

from megatron_ttrace.mcore.names import canonical_names
from megatron_ttrace.mcore.parameters import place_parameter
from megatron_ttrace.mcore.stacked import head_rows, stacked_outputs, stacked_parameters
from megatron_ttrace.placement.plan import describe
from tests.placement.meshes import mesh_of

ADAPTED = ("", ".to_wrap", ".adapter", ".adapter.linear_out")
"""Ends of names of modules whose output is a layer's, or is added to it."""


class Mamba(torch.nn.Module):
    """As ``MambaMixer`` on one of two ranks."""

    def __init__(self):
        super().__init__()
        self.in_proj = torch.nn.Linear(4, 20, bias=False)
        self.in_proj.weight.partition_sizes = [6, 6, 3, 3, 2]
        self.conv1d_weight = torch.nn.Parameter(torch.zeros(12, 1, 4))
        self.conv1d_weight.partition_sizes = [6, 3, 3]
        self.out_proj = torch.nn.Linear(6, 4, bias=False)


class DeltaNet(torch.nn.Module):
    """As ``GatedDeltaNet`` before it marked anything."""

    qk_dim, v_dim, num_value_heads = 4, 8, 2

    def __init__(self):
        super().__init__()
        self.in_proj = torch.nn.Linear(4, 14, bias=False)
        self.conv1d = torch.nn.Conv1d(8, 8, 4, groups=8, bias=False)
        self.out_norm = torch.nn.LayerNorm(4, bias=False)


def names():
    """Of both, one after the other."""
    model = torch.nn.Module()
    model.mixer, model.attention = Mamba(), DeltaNet()
    return canonical_names(model)


def test_parameters():
    """By Megatron's marks, or by the sizes that a delta net knows."""
    assert stacked_parameters(names()) == {
        "mixer.in_proj.weight": (6, 6, 3, 3, 2),
        "mixer.conv1d_weight": (2, 1, 1),
        "attention.in_proj.weight": (2, 2, 4, 4, 1, 1),
        "attention.conv1d.weight": (1, 1, 2),
    }


def test_strides():
    """A fork's gated layer has Megatron's mark; Megatron's own is known better."""
    model = torch.nn.Module()
    for name in ("gate_up", "linear_fc1", "down"):
        layer = torch.nn.Linear(4, 8)
        layer.weight.partition_stride = 1 if name == "down" else 2
        model.add_module(name, layer)
    assert stacked_parameters(canonical_names(model)) == {"gate_up.weight": 2}


def test_outputs():
    """Of the projections; a convolution's parameters are used by the layer that holds them."""
    shares = stacked_outputs([names()])
    assert shares == {
        "mixer.in_proj": (6, 6, 3, 3, 2),
        "attention.in_proj": (2, 2, 4, 4, 1, 1),
    }


def adapted(layer):
    """A layer with an adapter around it."""
    around = torch.nn.Module()
    around.to_wrap, around.adapter = layer, torch.nn.Module()
    around.adapter.linear_in = torch.nn.Linear(4, 2, bias=False)
    around.adapter.linear_out = torch.nn.Linear(2, 20, bias=False)
    return around


def test_an_adapter():
    """What it adds is stacked as the output that it is added to."""
    model = torch.nn.Module()
    model.mixer = Mamba()
    model.mixer.in_proj = adapted(model.mixer.in_proj)
    model.mixer.in_proj.adapter.weight_magnitude = torch.nn.Parameter(torch.ones(20))
    shares = (6, 6, 3, 3, 2)
    wrapped = canonical_names(model)
    assert stacked_parameters(wrapped) == {
        "mixer.in_proj.to_wrap.weight": shares,
        "mixer.in_proj.adapter.linear_out.weight": shares,
        "mixer.in_proj.adapter.weight_magnitude": shares,
        "mixer.conv1d_weight": (2, 1, 1),
    }
    assert stacked_outputs([wrapped]) == {f"mixer.in_proj{end}": shares for end in ADAPTED}


def test_rows_of_heads():
    """A delta net's norm sees each head of each token."""
    assert head_rows([names()]) == {"attention.out_norm": 2}


def test_place():
    """Each block is divided."""
    weight = torch.nn.Parameter(torch.zeros(4, 3))
    weight.tensor_model_parallel, weight.partition_dim = True, 0
    place = place_parameter("mixer.in_proj.weight", weight, mesh_of(1, 2, tp=2), stacked=(3, 1))
    assert (place.logical_shape, describe(place.placement)) == (
        (8, 3),
        "tp:BlockShard(0, (3, 1))",
    )
    rows = [box.logical[0] for box in place.boxes(mesh_of(1, 2, tp=2))]
    assert rows == [3, 7]


def gated(**options):
    """A gated MLP as Megatron's, and as an adapter wraps it."""
    model = torch.nn.Module()
    model.mlp = torch.nn.Module()
    model.mlp.config = SimpleNamespace(gated_linear_unit=True, **options)
    model.mlp.linear_fc1 = torch.nn.Linear(4, 12)
    model.mlp.linear_fc2 = torch.nn.Linear(6, 4)
    return model


def test_gate_and_up_projection():
    """Two equal blocks, of weight and bias, but not of the adapter's first layer."""
    model = gated()
    plain = canonical_names(model)
    assert stacked_parameters(plain) == {"mlp.linear_fc1.weight": 2, "mlp.linear_fc1.bias": 2}
    assert stacked_outputs([plain]) == {"mlp.linear_fc1": 2}
    model.mlp.linear_fc1 = adapted(model.mlp.linear_fc1)
    outputs = stacked_outputs([canonical_names(model)])
    assert outputs == {f"mlp.linear_fc1{end}": 2 for end in ADAPTED}


def test_alternating_gate_and_up_projection():
    """Of experts that read them so, a contiguous part has both; the option alone says nothing."""
    model = gated(moe_mlp_glu_interleave_size=2)
    assert stacked_parameters(canonical_names(model))
    model.mlp._remove_glu_interleaving = lambda x, size: x
    assert not stacked_parameters(canonical_names(model))
    model.mlp.config.moe_mlp_glu_interleave_size = None
    assert stacked_parameters(canonical_names(model))


def test_numbered_weights_of_experts():
    """All experts of a layer make one output; an adapter's weight has no number."""
    model = gated()
    experts = model.mlp.linear_fc1 = adapted(torch.nn.Module())
    for number in range(2):
        weight = torch.nn.Parameter(torch.zeros(12, 4))
        experts.to_wrap.register_parameter(f"weight{number}", weight)
    assert stacked_parameters(canonical_names(model)) == {
        "mlp.linear_fc1.to_wrap.weight0": 2,
        "mlp.linear_fc1.to_wrap.weight1": 2,
        "mlp.linear_fc1.adapter.linear_out.weight": 2,
    }


def test_fused_down_projection():
    """Of latent attention: queries, and keys and values with their positions."""
    model = torch.nn.Module()
    model.attention = torch.nn.Module()
    model.attention.config = SimpleNamespace(q_lora_rank=8, kv_lora_rank=8, qk_pos_emb_head_dim=4)
    model.attention.linear_qkv_down_proj = torch.nn.Linear(4, 10, bias=False)
    names = canonical_names(model)
    assert stacked_parameters(names) == {"attention.linear_qkv_down_proj.weight": (2, 3)}
    assert stacked_outputs([names]) == {"attention.linear_qkv_down_proj": (2, 3)}
