# SPDX-License-Identifier: Apache-2.0
"""Linear layers against the mathematics, and on two ranks against one."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_ttrace.cpu.te.distributed_weight import get_dummy_wgrad
from megatron_ttrace.cpu.te.grouped_linear import GroupedLinear
from megatron_ttrace.cpu.te.linear import LayerNormLinear, Linear
from megatron_ttrace.cpu.te.norms import LayerNorm
from megatron_ttrace.trace.errors import TTraceError
from tests.cpu.te.ranks import close, run_ranks, same_gradients

DOUBLE = {"params_dtype": torch.float64}


def randomise(module):
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


@pytest.mark.parametrize("bias", [False, True])
def test_linear(bias):
    module = randomise(Linear(6, 4, bias=bias, **DOUBLE))
    x = torch.randn(3, 2, 6, dtype=torch.float64, requires_grad=True)
    ours = module(x)
    theirs = F.linear(x, module.weight, module.bias if bias else None)
    same_gradients(ours, theirs, [x, *module.parameters()])


class InParts(torch.nn.Parameter):
    """A weight that keeps a half, and completes itself and its group."""

    is_distributed_weight = True

    def __new__(cls, whole):
        """The first half of the rows."""
        return super().__new__(cls, whole[: len(whole) // 2].clone())

    def __init__(self, whole):
        self.whole, self.group, self.asked = whole, [self], []
        self.main_grad = torch.zeros(self.shape, dtype=torch.float64)

    def materialize_group_for_forward(self):
        """In a buffer that is used again."""
        self.asked.append("forward")
        return self._listed([each.whole.clone() for each in self.group])

    def materialize_group_for_backward(self):
        """Likewise."""
        self.asked.append("backward")
        return self._listed([each.whole.clone() for each in self.group])

    def finalize_group_grads(self, gradients):
        """Keeps the first half; autograd gets a placeholder."""
        gradients = gradients if isinstance(gradients, list) else [gradients]
        for each, gradient in zip(self.group, gradients, strict=True):
            assert gradient.dtype == each.main_grad.dtype
            each.main_grad += gradient[: len(each)]
        return self._listed([torch.zeros_like(each) for each in self.group])

    def _listed(self, tensors):
        return tensors if len(self.group) > 1 else tensors[0]


@pytest.mark.parametrize("grouped", [False, True])
def test_a_weight_in_parts(grouped):
    """It is asked for the whole before each product, and given the gradient of the whole."""
    if grouped:
        module = randomise(GroupedLinear(2, 6, 4, bias=False, params_dtype=torch.float32))
        names, more = ["weight0", "weight1"], ([3, 2],)
    else:
        module = randomise(Linear(6, 4, bias=False, params_dtype=torch.float32))
        names, more = ["weight"], ()
    x = torch.randn(5, 6, requires_grad=True)
    expected = module(x, *more)
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, [x, *module.parameters()], grad)
    parts = [InParts(getattr(module, name).detach()) for name in names]
    for name, part in zip(names, parts, strict=True):
        part.group = parts
        delattr(module, name)
        module._parameters[name] = part
    output = module(x, *more)
    ours = torch.autograd.grad(output, [x, *parts], grad)
    assert torch.equal(output, expected)
    assert torch.equal(ours[0], wanted[0])
    assert not any(gradient.any() for gradient in ours[1:])
    for part, gradient in zip(parts, wanted[1:], strict=True):
        close(part.main_grad, gradient[: len(part)].double())
    assert parts[0].asked == ["forward", "backward"]


def test_a_dummy_is_shared_and_not_written() -> None:
    """Whoever adds it up without asking for zeros gets NaN; zeros remain, as in one buffer."""
    first, second = (get_dummy_wgrad([3, 5], torch.bfloat16) for _ in range(2))
    assert (first.shape, first.dtype) == ((3, 5), torch.bfloat16)
    assert first.data_ptr() == second.data_ptr()
    assert first.isnan().all()
    assert get_dummy_wgrad([5, 3], torch.bfloat16).isnan().all()
    assert not get_dummy_wgrad([3, 5], torch.bfloat16, zero=True).any()
    assert not first.any()


def test_bias_is_returned_instead_of_added():
    module = randomise(Linear(6, 4, return_bias=True, **DOUBLE))
    x = torch.randn(3, 6, dtype=torch.float64)
    output, bias = module(x)
    assert bias is module.bias
    close(output, F.linear(x, module.weight))
    assert Linear(6, 4, bias=False).bias.numel() == 0


def layer_norm_linear(x, module):
    gamma = module.layer_norm_weight + (1 if module.zero_centered_gamma else 0)
    shape = x.shape[-1:]
    if module.normalization == "LayerNorm":
        normalized = F.layer_norm(x, shape, gamma, module.layer_norm_bias, module.eps)
    else:
        normalized = F.rms_norm(x, shape, gamma, module.eps)
    return F.linear(normalized, module.weight, module.bias), normalized


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_layer_norm_linear(normalization, zero_centered):
    module = LayerNormLinear(
        6,
        4,
        normalization=normalization,
        zero_centered_gamma=zero_centered,
        return_layernorm_output=True,
        **DOUBLE,
    )
    randomise(module)
    x = torch.randn(3, 2, 6, dtype=torch.float64, requires_grad=True)
    ours, theirs = (torch.cat(both, -1) for both in (module(x), layer_norm_linear(x, module)))
    same_gradients(ours, theirs, [x, *module.parameters()])


def test_the_gradient_of_a_returned_norm_is_of_its_users():
    """Not that of the product: an adapter's input gradient is the adapter's, in all layouts."""
    module = randomise(LayerNormLinear(6, 4, return_layernorm_output=True, **DOUBLE))
    output, normalized = module(torch.randn(3, 2, 6, dtype=torch.float64))
    (gradient,) = torch.autograd.grad((output.sum(), 2 * normalized.sum()), normalized)
    close(gradient, torch.full_like(normalized, 2.0))


def test_a_frozen_norm_of_an_input_without_a_gradient():
    """As in the first layer, where the embedding and the norms are frozen, too."""
    module = randomise(LayerNormLinear(6, 4, normalization="RMSNorm", bias=False, **DOUBLE))
    module.layer_norm_weight.requires_grad_(False)
    x = torch.randn(3, 2, 6, dtype=torch.float64)
    module.bias = None
    same_gradients(module(x), layer_norm_linear(x, module)[0], [module.weight])


@pytest.mark.parametrize("kind", [Linear, LayerNormLinear])
def test_another_dtype_than_the_parameters_is_refused(kind):
    """As by TransformerEngine, outside of autocast."""
    with pytest.raises(TypeError, match=r"Found input dtype: torch.float32 and '\w+' dtype"):
        kind(4, 4, bias=False, params_dtype=torch.bfloat16)(torch.ones(2, 4))


@pytest.mark.parametrize("kind", [Linear, LayerNormLinear])
def test_under_autocast(kind, monkeypatch):
    """Both operands are rounded, and the gradient of the weight is not."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _="": True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda _: torch.bfloat16)
    module, x = randomise(kind(4, 6)), torch.randn(3, 2, 4, requires_grad=True)
    output = module(x)
    output.float().sum().backward()
    assert output.dtype == LayerNorm(normalized_shape=4)(x).dtype == torch.bfloat16
    assert x.grad.dtype == module.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("bias", [False, True])
def test_grouped_linear(bias):
    """One expert has no tokens."""
    module = randomise(GroupedLinear(3, 6, 4, bias=bias, **DOUBLE))
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    splits = [2, 0, 3]
    ours = module(x, splits)
    theirs = torch.cat(
        [
            F.linear(
                rows,
                getattr(module, f"weight{index}"),
                getattr(module, f"bias{index}") if bias else None,
            )
            for index, rows in enumerate(x.split(splits))
        ]
    )
    same_gradients(ours, theirs, [x, *module.parameters()])


def test_delayed_weight_gradient():
    now, later = (randomise(Linear(6, 4, delay_wgrad_compute=d, **DOUBLE)) for d in (False, True))
    x = torch.randn(3, 6, dtype=torch.float64)
    for module in (now, later):
        module(x).sum().backward()
    assert later.need_backward_dw()
    assert not now.need_backward_dw()
    assert later.weight.skip_backward_post_hook
    assert later.weight.grad is None
    collected = []
    later.register_wgrad_accumulation_and_reduce_hooks(lambda: collected.append(later.weight.grad))
    later.backward_dw()
    close(collected[0], now.weight.grad)


def test_fused_accumulation_leaves_the_gradient_to_autograd():
    """Megatron's buffers add a gradient that the layer did not add itself."""
    module = Linear(2, 2, fuse_wgrad_accumulation=True)
    module(torch.randn(3, 2)).sum().backward()
    assert module.weight.grad is not None
    assert not hasattr(module.weight, "grad_added_to_main_grad")


def cut(tensor, rank, *dims):
    """A rank's part of it, along these dims."""
    for dim in dims:
        tensor = tensor.chunk(2, dim)[rank].contiguous()
    return tensor


def copy_shards(whole, part, rank, mode):
    """Give a rank's module its part of the whole one's parameters."""
    dims = {"weight": 0 if mode == "column" else 1}
    if mode == "column":
        dims["bias"] = 0
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            value = cut(parameter, rank, dims[name]) if name in dims else parameter
            getattr(part, name).copy_(value)
    return dims


def check_two_ranks(rank, kind, mode, sequence_parallel=False, buffer=False, delayed=False):
    group = dist.group.WORLD
    normed = kind is LayerNormLinear
    whole = randomise(kind(6, 4, **DOUBLE))
    part = kind(
        6,
        4,
        parallel_mode=mode,
        tp_group=group,
        tp_size=2,
        sequence_parallel=sequence_parallel,
        ub_overlap_ag=buffer,
        ub_name="qkv" if buffer else None,
        delay_wgrad_compute=delayed,
        **DOUBLE,
    )
    dims = copy_shards(whole, part, rank, mode)
    torch.manual_seed(3)
    x, grad = torch.randn(4, 2, 6).double(), torch.randn(4, 2, 4).double()
    x_whole = x.clone().requires_grad_()
    output = whole(x_whole)
    output.backward(grad)

    sequence = [0] if sequence_parallel else []
    ins, outs = (sequence, [-1]) if mode == "column" else ([-1], sequence)
    x_part = cut(x, rank, *ins).clone().requires_grad_()
    ours = part(x_part)
    if buffer:
        # Another layer overwrites the buffer before the backward pass.
        part(torch.full_like(x_part, 9.0))
    ours.backward(cut(grad, rank, *outs))
    part.backward_dw()
    close(ours, cut(output, rank, *outs))
    close(x_part.grad, cut(x_whole.grad, rank, *ins))
    for name, parameter in part.named_parameters():
        value = parameter.grad
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(value)
        wanted = getattr(whole, name).grad
        close(value, cut(wanted, rank, dims[name]) if name in dims else wanted)
    assert part.weight.tensor_model_parallel
    assert part.weight.partition_dim == dims["weight"]
    if normed:
        assert part.layer_norm_weight.sequence_parallel is sequence_parallel


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("mode", [None, "column", "row"])
@pytest.mark.parametrize("kind", [Linear, LayerNormLinear])
def test_weights_are_marked_without_a_mode_too(kind, mode, replaced):
    """As by TransformerEngine's ``reset_parameters``; a gradient norm is counted by the mark.

    Megatron-FSDP replaces parameters on the meta device before.
    """
    if kind is LayerNormLinear and mode == "row":
        with pytest.raises(NotImplementedError):
            kind(6, 4, parallel_mode=mode)
        return
    module = kind(6, 4, parallel_mode=mode, tp_size=1, device="meta" if replaced else "cpu")
    if replaced:
        module.to_empty(device="cpu", recurse=False)
        assert not hasattr(module.weight, "partition_dim")
        module.reset_parameters()
    if kind is LayerNormLinear:
        assert module.layer_norm_weight.sequence_parallel is False
    assert module.weight.tensor_model_parallel
    assert module.weight.partition_dim == (1 if mode == "row" else 0)
    assert hasattr(module.bias, "tensor_model_parallel") == (mode == "column")
    assert hasattr(module.bias, "sequence_parallel") == (mode == "row")


@pytest.mark.parametrize("mode", ["column", "row"])
def test_features_that_ranks_cannot_share(mode):
    """An error as in TransformerEngine, and no layer that has lost some."""
    with pytest.raises(ValueError, match="8 is not divisible by 3"):
        Linear(8, 8, parallel_mode=mode, tp_size=3)


@pytest.mark.parametrize("mode", [None, "column", "row"])
def test_grouped_weights_are_not_marked(mode):
    """As in TransformerEngine since 2.13: Megatron 0.19 marks them (docs/findings.md, 29)."""
    assert not hasattr(GroupedLinear(1, 2, 2, parallel_mode=mode).weight0, "partition_dim")


def test_single_weight_is_refused_where_it_would_be_made(monkeypatch):
    """The option has no effect without the variable."""
    GroupedLinear(2, 2, 2, single_grouped_weight=True)
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    with pytest.raises(TTraceError, match="moe-single-grouped-weight"):
        GroupedLinear(2, 2, 2, single_grouped_weight=True)


@pytest.mark.parametrize("wrong", [{"tp_size": 2}, {"ub_overlap_ag": True}])
def test_grouped_linear_refuses_what_it_does_not_do(wrong):
    """Biases of a layer divided over ranks, and overlapped communication."""
    with pytest.raises(ValueError, match="GroupedLinear"):
        GroupedLinear(2, 6, 4, **wrong)


def check_all(rank):
    for sequence_parallel in (False, True):
        check_two_ranks(rank, Linear, "column", sequence_parallel)
        check_two_ranks(rank, Linear, "row", sequence_parallel)
        check_two_ranks(rank, LayerNormLinear, "column", sequence_parallel)
    for kind in (Linear, LayerNormLinear):
        check_two_ranks(rank, kind, "column", True, buffer=True)
        # The input that is gathered again for the weight's gradient has a gradient itself.
        check_two_ranks(rank, kind, "column", True, delayed=True)


def test_two_ranks_compute_what_one_does():
    run_ranks(2, check_all)
