# SPDX-License-Identifier: Apache-2.0
"""Every rank fills its own slice of the same logical parameter."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.cpu.operators.mamba import mamba_chunk_scan_combined
from megatron_ttrace.mcore.parameters import place_parameter
from megatron_ttrace.placement.mesh import SINGLE
from megatron_ttrace.placement.plan import describe
from megatron_ttrace.run.start.parameters import BIAS, EMBEDDING_GAIN, GAIN, fill, scale_of
from tests.placement.by_hand import chunk, gated_chunk
from tests.placement.meshes import mesh_of


@dataclasses.dataclass
class Config:
    """What is read of Megatron's configuration."""

    num_layers: int = 8
    init_method_std: float = 0.02
    layernorm_zero_centered_gamma: bool = False


def parameter(*shape, dtype=torch.float32, **attributes):
    """A parameter with Megatron's attributes on it."""
    made = torch.nn.Parameter(torch.full(shape, 99.0, dtype=dtype))
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def sharded(*shape, dim=0, **others):
    """As ``set_tensor_model_parallel_attributes`` marks it."""
    return parameter(
        *shape, tensor_model_parallel=True, partition_dim=dim, partition_stride=1, **others
    )


def filled(name, made, mesh=SINGLE, stacked=1, init="reveal"):
    """The start values of a local parameter."""
    place = place_parameter(name, made, mesh, stacked)
    fill(place, made, mesh, seed=7, config=Config(), init=init)
    return made.detach()


FC1 = "decoder.layers.0.mlp.linear_fc1.weight"
GROUPED = "decoder.layers.0.mlp.experts.linear_fc"
ETP_OF_TP = {"tp": 4, "etp": 2}
LOCAL = "decoder.layers.0.mlp.experts.local_experts.1.linear_fc"


@pytest.mark.parametrize(
    ("name", "made", "sizes", "stacked", "shape", "placement"),
    [
        ("a.weight", sharded(4, 6), {}, 2, (4, 6), "Replicate"),
        ("a.weight", sharded(4, 6), {"tp": 2}, 1, (8, 6), "tp:Shard(0)"),
        ("a.weight", sharded(4, 6, dim=1), {"tp": 2}, 2, (4, 12), "tp:Shard(1)"),
        ("a.weight", parameter(4, 6), {"tp": 2}, 2, (4, 6), "Replicate"),
        ("a.weight", parameter(4, tensor_model_parallel=False), {"tp": 2}, 2, (4,), "Replicate"),
        (FC1, sharded(4, 6), {"tp": 2}, 2, (8, 6), "tp:BlockShard(0, 2)"),
        (FC1, sharded(4, 6), {"tp": 2}, 1, (8, 6), "tp:Shard(0)"),
        ("a.linear_fc1.bias", sharded(4), {"tp": 2}, 2, (8,), "tp:BlockShard(0, 2)"),
        ("linear_fc1.weight", sharded(4, 6), {"tp": 2}, 2, (8, 6), "tp:BlockShard(0, 2)"),
        ("a.linear_fc2.weight", sharded(4, 6, dim=1), {"tp": 4}, 2, (4, 24), "tp:Shard(1)"),
        (FC1, sharded(4, 6, allreduce=False), {"tp": 2, "etp": 1}, 2, (4, 6), "Replicate"),
        # nothing on attention sinks says that heads are divided
        ("a.core_attention.softmax_offset", parameter(4), {"tp": 2}, 1, (8,), "tp:Shard(0)"),
        ("a.linear_qkv.adapter.weight_magnitude", parameter(4), {"tp": 2}, 1, (8,), "tp:Shard(0)"),
        ("a.linear_proj.adapter.weight_magnitude", parameter(4), {"tp": 2}, 1, (4,), "Replicate"),
        # experts, which older releases do not mark
        (f"{LOCAL}1.weight", parameter(4, 6), {"tp": 2}, 2, (8, 6), "etp:BlockShard(0, 2)"),
        (f"{LOCAL}1.bias", parameter(4), {"tp": 2}, 1, (8,), "etp:Shard(0)"),
        (f"{LOCAL}2.weight", parameter(4, 6), {"tp": 2}, 2, (4, 12), "etp:Shard(1)"),
        (f"{LOCAL}2.bias", parameter(4), {"tp": 2}, 2, (4,), "Replicate"),
        (f"{GROUPED}1.weight3", parameter(4, 6), {"tp": 2}, 2, (8, 6), "etp:BlockShard(0, 2)"),
        (f"{GROUPED}1.bias3", parameter(4), {"tp": 2}, 1, (8,), "etp:Shard(0)"),
        (f"{GROUPED}2.weight3", parameter(4, 6), {"tp": 2}, 2, (4, 12), "etp:Shard(1)"),
        (f"{GROUPED}2.bias3", parameter(4), {"tp": 2}, 2, (4,), "Replicate"),
        (f"{GROUPED}1.weight3", parameter(4, 6), {"tp": 2, "etp": 1}, 2, (4, 6), "Replicate"),
        ("a", sharded(4, 6, dim=1, allreduce=False), ETP_OF_TP, 2, (4, 12), "etp:Shard(1)"),
    ],
)
def test_places(name, made, sizes, stacked, shape, placement):
    """Read off the attributes that Megatron's layers set."""
    mesh = mesh_of(0, 4, **sizes)
    place = place_parameter(name, made, mesh, stacked)
    assert (place.logical_shape, describe(place.placement)) == (shape, placement)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_shards_equal_the_slices_of_the_whole(dtype):
    """Column, row and gated parallel weights, cut by hand."""
    cases = [
        ("a.weight", (8, 6), 0, chunk, 1),
        ("a.weight", (8, 6), 1, chunk, 1),
        (FC1, (8, 6), 0, gated_chunk, 2),
    ]
    for name, shape, dim, cut, stacked in cases:
        whole = filled(name, parameter(*shape, dtype=dtype), stacked=stacked)
        for rank in range(2):
            local = list(shape)
            local[dim] //= 2
            mesh = mesh_of(rank, 2, tp=2)
            values = filled(name, sharded(*local, dim=dim, dtype=dtype), mesh, stacked=stacked)
            assert values.dtype == dtype
            expected = cut(whole.float().numpy(), dim, rank, 2)
            np.testing.assert_array_equal(values.float().numpy(), expected)


class Group:
    """A process group of consecutive ranks."""

    def __init__(self, rank, size):
        self.rank, self.size = (lambda: rank), (lambda: size)


def gathered(*shape, number, parts, padding, **attributes):
    """Rows of a weight, as ``GTPShardedParam`` has them."""
    group = Group(number, parts)
    return sharded(*shape, is_gtp_weight_remat=True, group=group, pad_length=padding, **attributes)


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("dim", [0, 1])
def test_gathered_rows_are_the_weight(dim, padding):
    """Rows of four data-parallel ranks, two of which gather each other's; the last may be padding.

    Also flat ranges of them, of which one ends in the padding.
    """
    shape = [5, 6]  # what tensor parallelism leaves
    length = (shape[0] + 1) // 2 + (padding == 3)
    padding = 2 * length - shape[0]
    whole = list(shape)
    whole[dim] *= 2
    logical = filled("a.weight", parameter(*whole))
    for rank in range(8):
        tp, number = rank % 2, rank // 2 % 2
        mesh = mesh_of(rank, 8, tp=2)
        assert mesh.at("dp") % 2 == number
        made = gathered(length, 6, number=number, parts=2, padding=padding, dim=dim)
        values = filled("a.weight", made, mesh)
        part = logical.narrow(dim, tp * shape[dim], shape[dim])[number * length :][:length]
        assert torch.equal(values[: len(part)], part)
        assert (values[len(part) :] == 99.0).all()
        place = place_parameter("a.weight", made, mesh)
        assert place.replicated == ("cp",)
        flat = torch.full((length * 6 - 4,), 99.0)
        fill(place.flat(4, length * 6), flat, mesh, seed=7, config=Config(), init="reveal")
        kept = max(part.numel() - 4, 0)
        assert torch.equal(flat[:kept], part.reshape(-1)[4:])
        assert (flat[kept:] == 99.0).all()


def test_rows_of_another_rank_are_refused():
    """Consecutive data-parallel ranks have consecutive rows."""
    made = gathered(4, 6, number=0, parts=2, padding=0)
    with pytest.raises(ValueError, match=r"a\.weight: rank 1 has part 0 of 2"):
        place_parameter("a.weight", made, mesh_of(1, 2))


def test_replicas_are_equal_and_every_element_is_written():
    """A norm weight on four ranks."""
    values = [filled("norm.weight", parameter(9), mesh_of(r, 4, tp=2)) for r in range(4)]
    assert all(torch.equal(part, values[0]) for part in values)
    assert float(values[0].max()) < 5


@given(st.data())
def test_flat_ranges_equal_the_flattened_slice(data):
    """A ZeRO range of a gated shard, filled on its own."""
    rank = data.draw(st.integers(0, 1))
    mesh = mesh_of(rank, 2, tp=2)
    start = data.draw(st.integers(0, 24))
    end = data.draw(st.integers(start, 24))
    local = filled(FC1, sharded(4, 6), mesh, stacked=2)
    place = place_parameter(FC1, sharded(4, 6), mesh, stacked=2).flat(start, end)
    flat = torch.full((end - start,), 99.0)
    fill(place, flat, mesh, seed=7, config=Config(), init="reveal")
    assert torch.equal(flat, local.reshape(-1)[start:end])


@pytest.mark.parametrize(
    ("name", "shape", "init", "expected"),
    [
        ("a.linear_qkv.weight", (8, 100), "reveal", (0.0, GAIN / 10)),
        ("a.linear_proj.weight", (8, 100), "reveal", (0.0, GAIN / 10 / 4)),
        ("a.linear_fc2.weight", (8, 100), "reveal", (0.0, GAIN / 10 / 4)),
        ("a.linear_qkv.bias", (8,), "reveal", (0.0, BIAS)),
        ("embedding.word_embeddings.weight", (8, 100), "reveal", (0.0, EMBEDDING_GAIN / 10)),
        ("a.norm.weight", (8,), "reveal", (1.0, 0.2)),
        ("a.q_layernorm.weight", (8,), "reveal", (GAIN, 0.2 * GAIN)),
        ("a.linear_qkv.weight", (8, 100), "megatron", (0.0, 0.02)),
        ("a.linear_fc2.weight", (8, 100), "megatron", (0.0, 0.02 / 4)),
        ("a.linear_qkv.bias", (8,), "megatron", (0.0, 0.0)),
        ("a.norm.weight", (8,), "megatron", (1.0, 0.0)),
    ],
)
def test_scales(name, shape, init, expected):
    """Eight layers: the outputs' depth factor is four."""
    assert scale_of(name, shape, Config(), init) == pytest.approx(expected)


def test_states_of_mamba_layers_count():
    """What they add to the output is as large as the direct share, in small layers too."""
    numbers, heads, size, states = torch.Generator().manual_seed(0), 8, 16, 16

    def drawn(leaf, *shape):
        mean, std = scale_of(f"a.mixer.{leaf}", shape, Config(), "reveal")
        return torch.randn(shape, generator=numbers) * std + mean

    channels = heads * size + 2 * states
    convolved = GAIN * torch.randn(1, channels, 67, generator=numbers)
    weight, bias = drawn("conv1d_weight", channels, 1, 4), drawn("conv1d_bias", channels)
    convolved = F.silu(F.conv1d(convolved, weight, bias, groups=channels)).transpose(1, 2)
    x, keys, queries = convolved.split([heads * size, states, states], dim=2)
    x, steps = x.view(1, 64, heads, size), GAIN * torch.randn(1, 64, heads, generator=numbers)
    of_states = mamba_chunk_scan_combined(
        *(x, steps, -drawn("A_log", heads).exp(), keys.unsqueeze(2), queries.unsqueeze(2), 16),
        dt_bias=drawn("dt_bias", heads),
        dt_softplus=True,
    )
    assert 0.3 < of_states.norm() / (x * drawn("D", heads)[:, None]).norm() < 3.0


@pytest.mark.parametrize("init", ["reveal", "megatron"])
def test_zero_centred_norms(init):
    """With ``layernorm_zero_centered_gamma`` one is added in the layer."""
    config = Config(layernorm_zero_centered_gamma=True)
    assert scale_of("a.norm.weight", (8,), config, init)[0] == 0.0


def test_values_have_the_scale():
    """Of 40,000 numbers."""
    weight = filled("a.weight", parameter(200, 200), init="megatron")
    assert float(weight.std()) == pytest.approx(0.02, rel=0.02)
