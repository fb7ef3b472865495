# SPDX-License-Identifier: Apache-2.0
"""FP8 by emulation: what rounding does, and where the scales come from."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_ttrace.cpu import te
from megatron_ttrace.cpu.te import quantize
from megatron_ttrace.cpu.te.distributed import checkpoint
from megatron_ttrace.cpu.te.fp8 import FP8GlobalStateManager, fp8_autocast, fp8_model_init
from megatron_ttrace.cpu.te.grouped_linear import GroupedLinear
from megatron_ttrace.cpu.te.linear import LayerNormLinear, Linear
from megatron_ttrace.cpu.te.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
)
from tests.cpu.te.ranks import close, run_ranks

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MAX = {E4M3: 448.0, E5M2: 57344.0}
RECIPES = [DelayedScaling(), Float8CurrentScaling(), Float8BlockScaling(), MXFP8BlockScaling()]


@pytest.fixture(autouse=True)
def nothing_left_over():
    FP8GlobalStateManager.reset()
    yield
    FP8GlobalStateManager.reset()


@pytest.mark.parametrize("fp8", [E4M3, E5M2])
def test_saturation(fp8):
    big = torch.tensor([1e6, -1e6, float("inf"), float("nan"), 1.0])
    result = quantize.rounded(big, torch.ones(()), fp8)
    assert result[:3].tolist() == [MAX[fp8], -MAX[fp8], MAX[fp8]]
    assert result[3].isnan()
    assert result[4] == 1.0


@pytest.mark.parametrize(("fp8", "bits"), [(E4M3, 3), (E5M2, 2)])
def test_rounding_error_and_idempotence(fp8, bits):
    torch.manual_seed(0)
    x = torch.randn(1000).double()
    once = quantize.current_scaling(x, fp8)
    large = x.abs() > x.abs().max() * 2**-6
    assert ((once - x).abs() / x.abs())[large].max() <= 2.0 ** -(bits + 1)
    close(quantize.current_scaling(once, fp8), once)
    close(once.abs().max(), x.abs().max(), 1e-6)


@pytest.mark.parametrize("fp8", [E4M3, E5M2])
def test_other_scales_round_as_parts_do(fp8):
    """A replay's other scale moves a tensor about as far as a scale for each part of it does."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).double()
    whole = quantize.current_scaling(x, fp8)
    parts = torch.cat([quantize.current_scaling(part, fp8) for part in x.chunk(4)])
    with quantize.other_scales(torch.Generator().manual_seed(1)):
        first, second = (quantize.current_scaling(x, fp8) for _ in range(2))
    assert not torch.equal(first, second)
    sharded = (parts - whole).norm()
    for replay in (first, second):
        assert 0.5 * sharded < (replay - whole).norm() < 2 * sharded
        assert (replay - x).abs().max() < x.abs().max() * 2.0**-3
    assert torch.equal(quantize.current_scaling(x, fp8), whole)


def test_another_power_of_two_rounds_alike():
    """But for what is so small beside its block that it has no full mantissa left."""
    x = torch.randn(4, 200)
    x = torch.where(x.abs() < 0.1, torch.ones(()), x)
    plain = quantize.block_scaling(x, (1, 128), E4M3)
    for seed in range(4):
        with quantize.other_scales(torch.Generator().manual_seed(seed)):
            assert torch.equal(quantize.block_scaling(x, (1, 128), E4M3), plain)


def test_a_given_scale_is_another_elsewhere():
    """Delayed scales come from other microbatches."""
    x = torch.randn(4, 200)
    with quantize.other_scales(torch.Generator().manual_seed(1)):
        inside = quantize.rounded(x, torch.ones(()), E4M3)
    moved = float((inside - quantize.rounded(x, torch.ones(()), E4M3)).norm() / x.norm())
    assert 0.01 < moved < 0.08


def test_scale():
    amax = torch.tensor([2.0, 0.0, float("inf"), 1e-42])
    old = torch.full((4,), 7.0)
    scale = quantize.scale_from_amax(amax, 448.0, old)
    assert scale.tolist()[:3] == [224.0, 7.0, 7.0]
    assert scale[3] == torch.finfo(torch.float32).max
    assert quantize.scale_from_amax(amax, 448.0, margin=1)[0] == 112.0
    assert quantize.scale_from_amax(amax, 448.0, power_of_two=True)[0] == 128.0


@given(
    st.floats(2.0**-90, 2.0**90, width=32),
    st.sampled_from([448.0, 57344.0]),
)
@example(3.9375, 57344.0)  # where a GPU's values differed
def test_a_scale_is_rounded_once(largest, maximum):
    """As a GPU divides; a power of two has that one's exponent."""
    exact = np.float32(maximum) / np.float32(largest)
    amax = torch.tensor(largest)
    assert quantize.scale_from_amax(amax, maximum).item() == exact
    power = quantize.scale_from_amax(amax, maximum, power_of_two=True).item()
    assert power <= exact < 2 * power
    assert np.frexp(power)[0] == 0.5


def test_a_block_does_not_feel_another():
    x = torch.randn(4, 200)
    changed = x.clone()
    changed[0, :128] *= 1000
    one, other = (quantize.block_scaling(t, (1, 128), E4M3) for t in (x, changed))
    close(one[1:], other[1:])
    close(one[0, 128:], other[0, 128:])
    assert one.shape == x.shape
    # The scale is a power of two, and so exact.
    close(quantize.block_scaling(x * 4, (1, 128), E4M3), one * 4)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
def test_product_of_rounded_operands(recipe):
    torch.manual_seed(0)
    layer = Linear(160, 8, bias=False)
    x = torch.randn(8, 160, requires_grad=True)
    with fp8_autocast(fp8_recipe=recipe):
        output = layer(x)
    output.backward(torch.randn(8, 8))
    exact = x @ layer.weight.t()
    error = (output - exact).norm() / exact.norm()
    assert 1e-3 < error < 0.1
    assert x.grad is not None
    assert layer.weight.grad is not None
    with fp8_autocast(enabled=False):
        close(layer(x), exact, 1e-5)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("in_fp8", [False, True])
def test_a_weight_is_rounded_by_the_first_microbatch(recipe, in_fp8):
    """Later ones use what it left, unless they say nothing, or the weight itself is in FP8."""
    with fp8_model_init(in_fp8):
        layer = Linear(160, 8, bias=False)
    x = torch.randn(8, 160)

    def product(first):
        with fp8_autocast(fp8_recipe=recipe):
            return layer(x, is_first_microbatch=first)

    before = product(True)
    with torch.no_grad():
        layer.weight.neg_()
    signs = [
        float(torch.sum(product(first) * before).sign()) for first in (False, None, True, False)
    ]
    assert signs == [-1.0 if in_fp8 else 1.0, -1.0, -1.0, -1.0]


def test_delayed_scales_come_from_earlier_passes():
    recipe = DelayedScaling(amax_history_len=2, fp8_format=Format.HYBRID)
    layer = Linear(16, 8, bias=False)
    with torch.no_grad():
        layer.weight.fill_(0.5)
    scales, grad_scales = [], []
    for size in (2.0, 1.0, 1.0, 1.0):
        x = torch.full((8, 16), size, requires_grad=True)
        with fp8_autocast(fp8_recipe=recipe):
            output = layer(x)
        output.backward(torch.full((8, 8), 0.25))
        scales.append(layer.fp8_meta["scaling_fwd"].scale[:2].tolist())
        grad_scales.append(layer.fp8_meta["scaling_bwd"].scale[0].item())
    assert [scale[0] for scale in scales] == [224.0, 224.0, 448.0, 448.0]
    assert [scale[1] for scale in scales] == [896.0] * 4
    assert grad_scales == [4 * MAX[E5M2]] * 4
    assert layer.fp8_meta["scaling_fwd"].amax_history.shape == (2, 3)


def test_scales_are_updated_once_for_all_layers_of_a_context():
    recipe = DelayedScaling(amax_history_len=4)
    layers = torch.nn.ModuleList([Linear(16, 16), Linear(16, 16)])
    x = torch.ones(8, 16, requires_grad=True)
    with fp8_autocast(fp8_recipe=recipe):
        output = layers[1](layers[0](x))
        # Inside the context nothing has changed yet.
        assert layers[0].fp8_meta["scaling_fwd"].scale.tolist() == [1.0] * 3
    assert layers[0].fp8_meta["scaling_fwd"].scale[0] == 448.0
    output.sum().backward()
    for layer in layers:
        assert layer.fp8_meta["scaling_bwd"].scale[0] != 1.0
        history = layer.fp8_meta["scaling_bwd"].amax_history
        assert (history[:, 0] > 0).tolist() == [False, False, False, True]


def test_recomputed_pass_rounds_with_the_scales_of_the_first():
    """Three passes are under way before the first is recomputed."""

    def run(recompute):
        FP8GlobalStateManager.reset()
        torch.manual_seed(0)
        layer = Linear(16, 16)
        inputs = [torch.randn(8, 16).mul(3.0**i).requires_grad_() for i in range(3)]
        outputs = []
        for x in inputs:
            with fp8_autocast(fp8_recipe=DelayedScaling(amax_history_len=1)):
                outputs.append(checkpoint(layer, x) if recompute else layer(x))
        for output in outputs:
            output.square().sum().backward()
        meta = layer.fp8_meta
        return [
            *outputs,
            layer.weight.grad,
            *(x.grad for x in inputs),
            meta["scaling_fwd"].scale,
            meta["scaling_bwd"].scale,
            meta["scaling_fwd"].amax_history,
        ]

    for one, other in zip(run(False), run(True), strict=True):
        assert torch.equal(one, other)


def test_weight_gradient_in_high_precision():
    torch.manual_seed(0)
    x, grad = torch.randn(8, 16), torch.randn(8, 16)
    errors = []
    for exact in (False, True):
        layer = Linear(16, 16, bias=False)
        recipe = DelayedScaling(override_linear_precision=(False, False, exact))
        with fp8_autocast(fp8_recipe=recipe):
            layer(x).backward(grad)
        errors.append((layer.weight.grad - grad.t() @ x).norm())
    assert errors[0] > 1e-3
    assert errors[1] < 1e-5


def test_saving_the_original_input_changes_nothing():
    results = []
    for original in (False, True):
        FP8GlobalStateManager.reset()
        torch.manual_seed(0)
        layer = Linear(16, 16, save_original_input=original)
        for _ in range(2):
            x = torch.randn(8, 16, requires_grad=True)
            with fp8_autocast(fp8_recipe=Float8CurrentScaling()):
                layer(x).square().sum().backward()
        results.append((layer.weight.grad, x.grad))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_rounding_an_input_again_needs_its_own_scale():
    layer = Linear(16, 16, save_original_input=True)
    with fp8_autocast(fp8_recipe=DelayedScaling()), pytest.raises(ValueError, match="delayed"):
        layer(torch.randn(16, 16))


@pytest.mark.parametrize("kind", [Linear, LayerNormLinear])
@pytest.mark.parametrize(("rows", "inner", "outer"), [(7, 16, 8), (8, 24, 8), (8, 16, 4)])
def test_sizes_that_kernels_do_not_take(kind, rows, inner, outer):
    with fp8_autocast(fp8_recipe=Float8CurrentScaling()), pytest.raises(ValueError, match="16"):
        kind(inner, outer)(torch.randn(rows, inner))


def test_option_of_a_recipe_that_is_not_implemented(monkeypatch):
    """Refused, not passed over."""
    monkeypatch.setenv("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", "1")
    with pytest.raises(NotImplementedError, match="use_power_2_scales"):
        Float8CurrentScaling()
    Float8BlockScaling()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
def test_experts_have_scales_of_their_own(recipe):
    torch.manual_seed(0)
    grouped = GroupedLinear(2, 16, 16, bias=False)
    x = torch.randn(24, 16)
    with fp8_autocast(fp8_recipe=recipe):
        output = grouped(x, [8, 16])
        for index, rows in enumerate(x.split([8, 16])):
            single = Linear(16, 16, bias=False)
            with torch.no_grad():
                single.weight.copy_(getattr(grouped, f"weight{index}"))
            close(output.split([8, 16])[index], single(rows))


def check_checkpoint(rank):
    te.install()
    torch.manual_seed(0)
    layer, other = Linear(16, 16), Linear(16, 16)
    with fp8_autocast(fp8_recipe=DelayedScaling(amax_history_len=3)):
        layer(torch.randn(8, 16)).sum().backward()
    state = layer.get_extra_state()
    assert state.dtype == torch.uint8
    assert state.numel() > 0
    assert other.get_extra_state().numel() == 0
    other.set_extra_state(other.get_extra_state())
    other.set_extra_state(state)
    for direction in ("scaling_fwd", "scaling_bwd"):
        for name in ("scale", "amax_history"):
            one, two = (getattr(m.fp8_meta[direction], name) for m in (layer, other))
            assert torch.equal(one, two)


class Pickles(GroupedLinear):
    """As Megatron's: it divides the state among its experts."""

    def _encode_extra_state(self, state):
        raise AssertionError("pickled")

    def _decode_extra_state(self, state):
        raise AssertionError("unpickled")


def test_experts_divide_their_state():
    """Without a pickle; a state without FP8 is none."""
    layer = Pickles(2, 16, 16, bias=False)
    assert layer._decode_extra_state(layer.get_extra_state()) is None
    with fp8_autocast(fp8_recipe=DelayedScaling(amax_history_len=3)):
        layer(torch.randn(8, 16), [3, 5])
    state = layer._decode_extra_state(layer.get_extra_state())
    assert state["scale_fwd"].view(3, -1).shape == (3, 2)
    assert state["amax_history_bwd"].view(state["recipe"].amax_history_len, 2, -1).shape[2] == 2
    assert state["extra_fp8_variables"] == {"num_gemms": 2}
    layer.set_extra_state(layer._encode_extra_state(state))


def test_state_survives_a_checkpoint():
    """On its own: the stand-in is installed."""
    pytest.importorskip("megatron.core")
    run_ranks(1, check_checkpoint)


def check_reduction(rank):
    layer = Linear(16, 16, bias=False)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    x = torch.full((8, 16), float(1 + rank))
    with fp8_autocast(fp8_recipe=DelayedScaling(), fp8_group=dist.group.WORLD):
        layer(x).sum().backward()
    assert layer.fp8_meta["scaling_fwd"].scale[0] == 224.0

    lonely = Linear(16, 16, bias=False)
    with fp8_autocast(fp8_recipe=DelayedScaling(reduce_amax=False), fp8_group=dist.group.WORLD):
        lonely(x).sum().backward()
    assert lonely.fp8_meta["scaling_fwd"].scale[0] == 448.0 / (1 + rank)


def test_largest_values_are_reduced_over_the_group():
    run_ranks(2, check_reduction)
