# SPDX-License-Identifier: Apache-2.0
"""What an optimizer owns, and putting a step back."""

import sys
import types

import pytest
import torch
from torch import nn

from megatron_ttrace.mcore.optimizer import (
    MOMENTS,
    Owned,
    Snapshot,
    divided,
    family,
    leaves_of,
    owned_by,
    stored_main,
    unknown,
    with_remainders,
)
from megatron_ttrace.trace.copies import Copies


def plain(model, cls=torch.optim.AdamW, **options):
    """Megatron's ``FP32Optimizer``: it steps the model's own parameters."""
    return types.SimpleNamespace(optimizer=cls(model.parameters(), lr=0.1, **options))


def mixed(model):
    """``Float16OptimizerWithFloat16Params``: float32 copies of the bf16 ones."""
    halves = [p for p in model.parameters() if p.dtype == torch.bfloat16]
    fulls = [p for p in model.parameters() if p.dtype == torch.float32]
    mains = [nn.Parameter(p.detach().float()) for p in halves]
    return types.SimpleNamespace(
        optimizer=torch.optim.AdamW([{"params": mains + fulls}], lr=0.1),
        float16_groups=[halves],
        fp32_from_float16_groups=[mains],
        fp32_from_fp32_groups=[fulls],
    )


def sharded(parameters, ranges):
    """``DistributedOptimizer``: flat ranges of some parameters, those of float32 first."""
    where = dict(zip(parameters, ranges, strict=True))
    halves = [p for p in parameters if p.dtype == torch.bfloat16]
    fulls = [p for p in parameters if p.dtype == torch.float32]
    mains = [
        nn.Parameter(p.detach().float().reshape(-1)[slice(*where[p])].clone())
        for p in (*fulls, *halves)
    ]

    def range_map(parameter):
        start, end = where[parameter]
        return {"param": types.SimpleNamespace(start=start, end=end)}

    return types.SimpleNamespace(
        optimizer=torch.optim.AdamW(mains, lr=0.1),
        model_param_group_index_map={p: (0, i) for i, p in enumerate(parameters)},
        model_fp32_groups=[fulls],
        model_float16_groups=[halves],
        _get_model_param_range_map=range_map,
    )


def chained(*parts):
    """``ChainedOptimizer``."""
    return types.SimpleNamespace(chained_optimizers=list(parts))


def test_leaves_of_nested_chains():
    """Dense and expert optimizers, chained in chains."""
    a, b, c = (types.SimpleNamespace(name=n) for n in "abc")
    assert [leaf.name for leaf in leaves_of(chained(a, chained(b, c)))] == ["a", "b", "c"]
    assert list(leaves_of(a)) == [a]


def test_the_models_own_parameters():
    model = nn.Linear(2, 3)
    optimizer = plain(model)
    owned = owned_by(optimizer)
    assert list(owned) == list(model.parameters())
    assert owned[model.weight].main is model.weight
    assert owned[model.weight].range is None
    assert owned[model.weight].group is optimizer.optimizer.param_groups[0]


def test_looking_at_state_creates_none():
    """Empty before the first step, and still empty afterwards."""
    model = nn.Linear(2, 3)
    optimizer = plain(model)
    assert owned_by(optimizer)[model.weight].state == {}
    assert len(optimizer.optimizer.state) == 0
    model(torch.ones(1, 2)).sum().backward()
    optimizer.optimizer.step()
    assert "exp_avg" in owned_by(optimizer)[model.weight].state


def test_float32_copies():
    """A bf16 weight has a main of its own, a float32 bias is its own."""
    model = nn.Linear(2, 3)
    model.weight.data = model.weight.data.bfloat16()
    optimizer = mixed(model)
    owned = owned_by(optimizer)
    assert owned[model.weight].main is optimizer.fp32_from_float16_groups[0][0]
    assert owned[model.bias].main is model.bias


def test_ranges_of_both_precisions_in_one_group():
    """Each parameter has its own range, though another order numbers them."""
    model = nn.Linear(4, 3)
    model.weight.data = model.weight.data.bfloat16()
    owned = owned_by(chained(sharded(list(model.parameters()), [(2, 9), (0, 3)])))
    assert torch.equal(owned[model.weight].main.detach(), model.weight.float().reshape(-1)[2:9])
    assert torch.equal(owned[model.bias].main.detach(), model.bias.detach())
    assert (owned[model.weight].range, owned[model.bias].range) == ((2, 9), (0, 3))


def test_an_update_that_the_model_has_not_received():
    """What was stepped and not copied counts as it is in the model; what was only rounded, not."""
    model = nn.Linear(4, 3)
    model.weight.data = model.weight.data.bfloat16()
    optimizer = mixed(model)
    part = owned_by(optimizer)[model.weight]
    part.main.data.add_(1e-4)
    model.weight.data.copy_(part.main)
    assert torch.equal(part.received(model.weight), part.main)
    before = model.weight.detach().clone()
    part.main.data[1] += 0.5
    assert torch.equal(part.received(model.weight)[1], before[1].float())
    assert torch.equal(part.received(model.weight)[::2], part.main[::2])


def test_a_range_that_the_model_has_not_received():
    """Of a divided parameter, the elements that are stepped here; others are not owned here."""
    model = nn.Linear(4, 3)
    [(parameter, part)] = owned_by(chained(sharded([model.weight], [(2, 9)]))).items()
    assert (parameter is model.weight, part.range) == (True, (2, 9))
    assert torch.equal(part.received(model.weight), part.main.detach())
    model.weight.data.view(-1)[2:4] = 9.0
    assert (part.received(model.weight) == 9.0).tolist() == [True, True, *5 * [False]]


def test_an_update_that_a_sharded_model_has_not_received():
    """With FSDP the elements that are stepped have a copy in the model's own precision."""
    model = nn.Linear(4, 3)
    optimizer = plain(model).optimizer
    main, group = torch.linspace(0.1, 1.0, 7), optimizer.param_groups[0]
    fresh, stale = main.bfloat16(), main.bfloat16()
    stale[2:4] = 9.0
    for weights in (fresh, stale, None, torch.zeros(7, dtype=torch.uint8)):  # FP8 is kept as bytes
        part = Owned(main, optimizer, group, (2, 9), model.weight, computed=weights)
        found = part.received(model.weight)
        assert torch.equal(found != main, weights == 9.0 if weights is stale else main < 0.0)


def test_parameters_that_other_ranks_step():
    """A layer-wise optimizer knows them all, at any depth of a chain, and owns some as wholes."""
    model = nn.Linear(2, 3)
    leaf = types.SimpleNamespace(optimizer=torch.optim.SGD([model.weight], lr=0.1))
    layer_wise = chained(leaf)
    layer_wise.dp_cp_params_list = [[model.weight], [model.bias]]
    layer_wise.expt_dp_params_list = None
    assert divided(layer_wise) == divided(chained(layer_wise, leaf)) == set(model.parameters())
    assert list(owned_by(chained(layer_wise))) == [model.weight]
    assert divided(plain(model)) == set()


def test_stubs_own_nothing():
    """A rank without parameters of a kind has a stub."""
    stub = types.SimpleNamespace(optimizer=None)
    second_leaf = plain(nn.Linear(1, 1))
    second_leaf.is_stub_optimizer = True
    assert owned_by(chained(stub, second_leaf)) == {}


def train(model, optimizer, seed):
    """One step on random data, with a random number drawn on the way."""
    torch.manual_seed(seed) if seed is not None else None
    optimizer.zero_grad()
    (model(torch.randn(5, 4)) ** 2).sum().backward()
    optimizer.step()
    return torch.rand(1)


class WithBuffer(nn.Sequential):
    """Two layers with running statistics between."""

    def __init__(self):
        torch.manual_seed(3)
        super().__init__(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def bits(model, optimizer):
    """Everything a step changes."""
    state = optimizer.state_dict()
    flat = [t for s in state["state"].values() for t in s.values() if torch.is_tensor(t)]
    tensors = [*model.state_dict().values(), *flat, torch.get_rng_state()]
    return [t.clone() for t in tensors], [
        {k: v for k, v in group.items() if k != "params"} for group in state["param_groups"]
    ]


def same(a, b):
    """Equality to the bit."""
    return a[1] == b[1] and len(a[0]) == len(b[0]) and all(map(torch.equal, a[0], b[0]))


@pytest.mark.parametrize("room", [sys.maxsize, 90, 0])
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.SGD])
def test_a_restored_step_can_be_replayed_bit_for_bit(tmp_path, cls, steps_before, room):
    """Parameters, buffers, moments, settings, random state; as often as wanted.

    Copied in memory, in part in a file, or all in a file.
    """
    model = WithBuffer()
    wrapper = plain(model, cls)
    inner = wrapper.optimizer
    for seed in range(steps_before):
        train(model, inner, seed)
    start = bits(model, inner)
    copies = Copies(room, 0, tmp_path)
    snapshot = Snapshot([model], wrapper, copies)
    assert (copies._file is None) == (room == sys.maxsize)
    ends = []
    for _ in range(3):
        train(model, inner, None)
        inner.param_groups[0]["lr"] *= 0.5
        inner.param_groups[0]["new"] = 1
        train(model, inner, None)
        ends.append(bits(model, inner))
        assert not same(ends[-1], start)
        snapshot.restore()
        assert same(bits(model, inner), start)
    copies.__exit__()
    assert same(ends[0], ends[1])
    assert same(ends[0], ends[2])


def test_moments_that_a_step_has_lost_are_restored(tmp_path):
    """Also from a file, as tensors that can be changed."""
    model = WithBuffer()
    wrapper = plain(model)
    inner = wrapper.optimizer
    train(model, inner, 0)
    start = bits(model, inner)
    for room in (sys.maxsize, 0):
        with Copies(room, 0, tmp_path) as copies:
            snapshot = Snapshot([model], wrapper, copies)
            for _ in range(2):
                inner.state.clear()
                snapshot.restore()
                assert same(bits(model, inner), start)
                inner.state[model[0].weight]["exp_avg"].add_(1.0)
                snapshot.restore()


def test_restoring_keeps_every_reference():
    """Others hold the tensors: they are written in place."""
    model = WithBuffer()
    wrapper = plain(model)
    train(model, wrapper.optimizer, 0)
    moments = wrapper.optimizer.state[model[0].weight]["exp_avg"]
    pointers = [t.data_ptr() for t in (*model.parameters(), *model.buffers(), moments)]
    snapshot = Snapshot([model], wrapper)
    train(model, wrapper.optimizer, 1)
    snapshot.restore()
    again = wrapper.optimizer.state[model[0].weight]["exp_avg"]
    assert pointers == [t.data_ptr() for t in (*model.parameters(), *model.buffers(), again)]


class Replacing(nn.Module):
    """A forward pass that puts other tensors in the place of buffers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("table", torch.zeros(2))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x
        self.table = torch.ones(len(x) + 1)
        return x


def test_buffers_that_a_step_has_replaced_are_restored():
    """If they are alike: a table that has grown is what its module takes it for."""
    model = Replacing()
    snapshot = Snapshot([model], chained())
    for _ in range(2):
        model(torch.ones(2))
        snapshot.restore()
        assert model.mean.tolist() == [0.0, 0.0]
        assert model.table.tolist() == [1.0, 1.0, 1.0]


def test_main_parameters_are_restored():
    """The float32 copies as well as the model's bf16."""
    model = nn.Linear(4, 4)
    model.weight.data = model.weight.data.bfloat16()
    wrapper = mixed(model)
    main = wrapper.fp32_from_float16_groups[0][0]
    before = main.detach().clone(), model.weight.detach().clone()
    snapshot = Snapshot([model], chained(wrapper))
    with torch.no_grad():
        main.add_(1)
        model.weight.add_(1)
    snapshot.restore()
    assert torch.equal(main, before[0])
    assert torch.equal(model.weight, before[1])


def test_settings_that_are_tensors_are_restored():
    """A learning rate or a step count may be a tensor that is changed in place."""
    model = nn.Linear(4, 4)
    wrapper = plain(model)
    group = wrapper.optimizer.param_groups[0]
    group["step"] = torch.tensor(3.0)
    snapshot = Snapshot([model], wrapper)
    for _ in range(2):
        group["step"] += 1
        snapshot.restore()
        assert float(group["step"]) == 3.0


def test_the_loss_scale_is_restored():
    """With float16 a step may change it, and what it counts towards the next change."""
    model = nn.Linear(4, 4)
    wrapper = plain(model)
    scaler = types.SimpleNamespace(_scale=torch.tensor([8.0]), _growth_tracker=5)
    wrapper.grad_scaler = scaler
    snapshot = Snapshot([model], chained(wrapper))
    scaler._scale, scaler._growth_tracker = scaler._scale / 2, 0
    snapshot.restore()
    assert (scaler._scale.tolist(), scaler._growth_tracker) == ([8.0], 5)


class Lion(torch.optim.SGD):
    """With the state of such an optimizer."""

    def means(self):
        """Of all gradients."""
        return [state["exp_avg"] for state in self.state.values()]


def owned_by_lion(moment: torch.Tensor | None) -> Owned:
    """A parameter that emerging_optimizers' Lion steps."""
    weight = nn.Parameter(torch.ones(3))
    lion = Lion([weight], lr=1e-3)
    group = {"betas": (0.9, 0.99)}
    if moment is not None:
        lion.state[weight] = {"exp_avg": moment}
    return Owned(weight, lion, group)


def test_a_step_by_signs_is_continuous():
    """A sign that a little more gradient turns around changes next to nothing; others all."""
    before, gradient = torch.tensor([0.01, 1e-9, -0.01]), torch.tensor([0.0, 0.0, 0.005])
    steps = []
    for more in (-1e-7, 1e-7):
        owned = owned_by_lion(None)
        assert owned.steps_by_sign
        mixed = 0.9 * before + 0.1 * (gradient + more)
        after = 0.99 * before + 0.01 * (gradient + more)
        owned.inner.state[owned.main] = {"exp_avg": after}
        steps.append(owned.smooth(-mixed.sign(), before))
        assert [tensor.shape for tensor in owned.decisive] == [(3,), (3,)]
    assert torch.equal(steps[0][[0, 2]], torch.tensor([-1.0, 1.0]))
    torch.testing.assert_close(*steps, atol=1e-4, rtol=0.0)


class Derived(torch.optim.AdamW):
    """A user's, which keeps the state of its base."""


class OfItsOwn(torch.optim.AdamW):
    """A user's, which makes its own state."""

    def _init_group(self, *args):
        """Makes none."""


class Corrects(torch.optim.AdamW):
    """A user's, which changes what its base has done."""

    def step(self, closure=None):
        """As its base."""
        return super().step(closure)


class Steps(torch.optim.AdamW):
    """A user's, which has only its groups from its base."""

    def __init__(self, params):
        """With defaults."""
        super().__init__(params)

    def step(self, closure=None):
        """In its own way."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("m", torch.zeros_like(parameter))


class Adam(torch.optim.Optimizer):
    """A user's of this name."""

    def __init__(self, params):
        """With defaults."""
        super().__init__(params, {})

    step = Steps.step


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (torch.optim.AdamW, "AdamW"),
        (Derived, "AdamW"),
        (OfItsOwn, "OfItsOwn"),
        (Corrects, "AdamW"),
        (Steps, "Steps"),
        (Adam, f"{__name__}.Adam"),
        (torch.optim.RMSprop, "RMSprop"),
    ],
)
def test_the_family_of_an_optimizer(optimizer, expected):
    """An optimizer without known moments starts without any: its first step shows little."""
    inner = optimizer([torch.zeros(2)])
    assert family(inner) == expected
    known = [] if expected in MOMENTS else [expected]
    assert unknown(types.SimpleNamespace(optimizer=inner)) == known


def test_a_first_step_by_signs():
    """Without moments only the gradient decides."""
    owned = owned_by_lion(torch.tensor([1e-3, 0.0, -1e-6]))
    step = owned.smooth(torch.tensor([-1.0, 0.0, 1.0]))
    torch.testing.assert_close(step, torch.tensor([-1.0, 0.0, 0.01]))
    owned = owned_by_lion(None)
    assert len(owned.decisive) == 1
    assert torch.equal(owned.smooth(torch.zeros(3)), torch.zeros(3))


def test_main_weights_of_which_only_the_lower_bits_are_stored():
    """As numbers; main weights that are whole numbers themselves stay as they are."""
    main = torch.tensor([1.003, -0.3, 3e-5, 0.0])
    weights = main.bfloat16()
    remainders = main.view(torch.int32) - (weights.view(torch.int16).to(torch.int32) << 16)
    assert remainders.lt(0).any()
    assert torch.equal(with_remainders(weights, remainders.to(torch.int16)), main)
    assert torch.equal(stored_main(remainders.float(), weights), main)
    ones = torch.ones(4)
    assert stored_main(ones, ones.bfloat16()) is ones
    assert stored_main(main, weights) is main
