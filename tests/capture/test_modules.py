# SPDX-License-Identifier: Apache-2.0
"""Values, gradients and names are right, and the tapped run is bitwise the untapped one."""

import functools
import itertools

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from megatron_ttrace.capture.modules import ModuleTap
from megatron_ttrace.trace.records import Kind
from tests.capture.recorder import Block, Model, Recorder, batch, tapped

GRADIENTS = (Kind.GRAD_INPUT, Kind.GRAD_OUTPUT)
again = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=True)


def run(model, sink=None, seed=0, errors=None):
    """One microbatch, forward and backward; returns the loss."""
    ids, labels = batch(seed)
    if sink is None:
        loss = model(ids, labels=labels)
        loss.backward()
        return loss
    with tapped([model], sink, errors=errors):
        loss = model(ids, labels=labels)
        loss.backward()
    return loss


def by_hand(model, seed=0):
    """The activations of :class:`Model` and their gradients, without any hook."""
    ids, labels = batch(seed)
    x = model.embedding(ids)
    kept = {(Kind.OUTPUT, "embedding"): x}
    for number, layer in enumerate(model.layers):
        name = f"layers.{number}"
        kept[Kind.INPUT, name] = kept[Kind.INPUT, f"{name}.first"] = x
        h = layer.first(x)
        kept[Kind.OUTPUT, f"{name}.first"] = kept[Kind.INPUT, f"{name}.act"] = h
        a = layer.act(h)
        kept[Kind.OUTPUT, f"{name}.act"] = kept[Kind.INPUT, f"{name}.second"] = a
        s = layer.second(a)
        kept[Kind.OUTPUT, f"{name}.second"] = s
        x = x + s
        kept[Kind.OUTPUT, name] = x
    kept[Kind.INPUT, "output_layer"] = x
    logits = model.output_layer(x)
    kept[Kind.OUTPUT, "output_layer"] = logits
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    kept[Kind.OUTPUT, "model"] = loss
    gradients = torch.autograd.grad(loss, list(kept.values()))
    for (kind, name), gradient in zip(list(kept), gradients, strict=True):
        other = Kind.GRAD_INPUT if kind is Kind.INPUT else Kind.GRAD_OUTPUT
        kept[other, name] = gradient
    return kept


@pytest.mark.parametrize("recompute", [False, True])
def test_values_and_gradients(recompute):
    """Every input, output and gradient, bit for bit, once; with recomputation as without."""
    sink = Recorder()
    run(Model(recompute=recompute), sink)
    expected = by_hand(Model())
    found = {
        (kind, name): value
        for (_, kind, name, _), value in sink.values.items()
        if value.is_floating_point()
    }
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value.detach()), key
    assert {place[0] for place in sink.values} == {0}
    forward = (key for key in expected if key[0] in (Kind.INPUT, Kind.OUTPUT))
    inside = {key for key in forward if key[1].startswith("layers.")}
    assert {place[1:3] for place in sink.later} == (inside if recompute else set())
    assert all(torch.equal(sink.values[place], value) for place, value in sink.later.items())


@pytest.mark.parametrize("recompute", [False, True])
def test_capture_changes_no_bit(recompute):
    """Loss and every parameter's gradient, with and without a tap."""
    plain, traced = Model(recompute=recompute), Model(recompute=recompute)
    losses = run(plain), run(traced, Recorder())
    assert torch.equal(*losses)
    for (name, a), b in zip(plain.named_parameters(), traced.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name


def assert_untouched(model):
    """No hook is left."""
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert "forward" not in vars(module)


def test_nothing_is_left_behind():
    """After the traced step the model has no hooks and a second step is not recorded."""
    model, sink = Model(), Recorder()
    run(model, sink)
    count = len(sink.values)
    run(model)
    assert len(sink.values) == count
    assert_untouched(model)


def test_a_model_whose_forward_is_called_directly():
    """As Megatron-FSDP calls it before 0.19: without the hooks of the model itself."""
    direct, called, model = Recorder(), Recorder(), Model()
    for sink in (direct, called):
        with tapped([model], sink, microbatches=[4, 5]):
            forward = model.forward if sink is direct else model
            for seed in range(2):
                ids, labels = batch(seed)
                forward(ids, labels=labels).backward()
    assert direct.values.keys() == called.values.keys()
    assert (5, Kind.OUTPUT, "model", 0) in direct.values
    for key, value in called.values.items():
        assert torch.equal(direct.values[key], value)


def test_a_forward_of_its_own_is_put_back():
    model = Model()
    model.forward = own = model.forward
    run(model, Recorder())
    assert vars(model)["forward"] is own


def test_an_output_that_is_the_next_input_is_handed_over_once():
    """It comes again as a repetition of its first name, its gradient under all names at once."""
    sink = Recorder()
    run(Model(), sink)
    assert sink.repeats[0, Kind.INPUT, "layers.0.first", 0] == (0, Kind.OUTPUT, "embedding", 0)
    assert sink.repeats[0, Kind.INPUT, "layers.0.act", 0] == (0, Kind.OUTPUT, "layers.0.first", 0)
    assert (
        (0, Kind.GRAD_OUTPUT, "layers.0.first", 0),
        (0, Kind.GRAD_INPUT, "layers.0.act", 0),
    ) in sink.events


def test_integers_are_inputs_of_the_model_and_of_what_has_no_others():
    """Tokens and labels of the model; the embedding's indices, which are its tokens."""
    sink = Recorder()
    run(Model(), sink)
    integers = [place for place, value in sink.values.items() if not value.is_floating_point()]
    tokens, labels = (0, Kind.INPUT, "model", 0), (0, Kind.INPUT, "model", 1)
    assert integers == [tokens, labels, (0, Kind.INPUT, "embedding", 0)]
    assert sink.repeats[0, Kind.INPUT, "embedding", 0] == tokens


def test_integers_beside_others_are_no_inputs():
    """Such as counts of what was routed."""
    model, sink = Function(lambda self, x, counts: x * len(counts)), Recorder()
    model = Function(lambda self, x: self.inner(x, torch.ones(2, dtype=torch.int64)), inner=model)
    with tapped([model], sink):
        model(leaf(2, 3))
    assert (0, Kind.INPUT, "inner", 0) in {*sink.values, *sink.repeats}
    assert (0, Kind.INPUT, "inner", 1) not in {*sink.values, *sink.repeats}


class Function(nn.Module):
    """A module that computes what it is told."""

    def __init__(self, compute, **children):
        super().__init__()
        self.compute = compute
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, *args, **kwargs):
        return self.compute(self, *args, **kwargs)


def leaf(*shape):
    """An activation that wants a gradient, and is no leaf of the graph."""
    return torch.randn(*shape, requires_grad=True) * 1.0


def linear():
    return nn.Linear(3, 3)


ONES = torch.ones(2, 3)


def recorded(compute, **children):
    """A model that computes the sum of something, its input, and what was captured of a step."""
    model, sink, x = (
        Function(lambda self, x: compute(self, x).sum(), **children),
        Recorder(),
        leaf(2, 3),
    )
    with tapped([model], sink):
        model(x).backward()
    return model, sink, x


class IdentityOp(nn.Module):
    """Megatron's module that does nothing."""

    def forward(self, x):
        return x


@pytest.mark.parametrize("viewed", [False, True])
def test_what_an_identity_returns_is_what_entered(viewed):
    """Also where another hook makes a view of it: the residual belongs to the gradient."""
    norm = IdentityOp()
    if viewed:
        norm.register_forward_hook(lambda module, args, output: output.view_as(output))
    model, sink, _ = recorded(lambda m, x: x + m.last(m.norm(x)), norm=norm, last=linear())
    gradient = sink.values[0, Kind.GRAD_INPUT, "last", 0]
    torch.testing.assert_close(gradient, 1 + model.last.weight.sum(0).expand(2, 3))


def test_in_place_modification_is_noticed():
    """What left a module is not what enters the next, though it is the same tensor object.

    So Megatron's loss changes logits; with full backward hooks autograd would refuse.
    """
    _, sink, _ = recorded(lambda m, x: m.b(m.a(x).mul_(2.0)), a=linear(), b=linear())
    out, into = sink.values[0, Kind.OUTPUT, "a", 0], sink.values[0, Kind.INPUT, "b", 0]
    assert torch.equal(into, 2 * out)
    assert (0, Kind.INPUT, "b", 0) not in sink.repeats
    before, after = ((Kind.GRAD_OUTPUT, "a"), (Kind.GRAD_INPUT, "b"))
    assert torch.equal(sink.values[0, *before, 0], 2 * sink.values[0, *after, 0])


def test_a_module_that_runs_twice_gets_two_names():
    """Values and gradients of both calls, apart."""
    model, sink, x = recorded(lambda m, x: m.a(m.a(x)), a=linear())
    assert sink.names(Kind.OUTPUT) == ["a", "a#1", "model"]
    assert torch.equal(sink.values[0, Kind.OUTPUT, "a#1", 0], model.a(model.a(x)).detach())
    assert torch.equal(sink.values[0, Kind.GRAD_OUTPUT, "a#1", 0], ONES)
    assert torch.allclose(sink.values[0, Kind.GRAD_OUTPUT, "a", 0], ONES @ model.a.weight.detach())
    assert sorted(sink.names(Kind.GRAD_INPUT)) == ["a", "a#1", "model"]


def stage(layers):
    """What a pipeline stage hands over whose layers call the same module outside of themselves."""
    shared = linear()

    def forward(self, x):
        return shared(shared(x))

    def compute(model, x):
        for layer in model.layers:
            x = layer(x)
        return model.shared(x)

    calls = [Function(forward) for _ in layers]
    for layer, call in zip(layers, calls, strict=True):
        call.layer_number = layer + 1
    return recorded(compute, layers=nn.ModuleList(calls), shared=shared)[1]


def test_what_several_layers_call():
    """It is named for the layer, so that it does not matter what ran in earlier stages."""
    whole, stages = stage(range(4)), [stage([0, 1]), stage([2, 3])]
    for kind in (Kind.OUTPUT, Kind.GRAD_OUTPUT):
        held = [set(sink.names(kind)) for sink in stages]
        assert held[0] & held[1] == {"shared", "model"}
        assert held[0] | held[1] == set(whole.names(kind))
        assert {"shared#layers/2", "shared#layers/2#1"} <= held[1]


def test_a_layer_that_raises_an_error_runs_no_longer():
    def compute(model, x):
        with pytest.raises(ZeroDivisionError):
            model.layers[0](x)
        return model.shared(x)

    layer = Function(lambda self, x: x / (1 // 0))
    layer.layer_number = 1
    _, sink, _ = recorded(compute, layers=nn.ModuleList([layer]), shared=linear())
    assert sink.names(Kind.OUTPUT) == ["shared", "model"]


def test_gradients_of_a_shared_input_are_summed_over_its_consumers():
    """One tensor enters two modules: its gradient is complete, under both names."""
    model, sink, _ = recorded(lambda m, x: m.a(x) + m.b(x), a=linear(), b=linear())
    expected = ONES @ (model.a.weight + model.b.weight).detach()
    for name in ("a", "b"):
        assert torch.allclose(sink.values[0, Kind.GRAD_INPUT, name, 0], expected)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_recomputed_block_is_not_the_only_consumer(recompute):
    """What enters it and a residual branch has one gradient, as without recomputation."""
    block = Function(lambda self, x: self.b(x), b=linear())
    _, sink, _ = recorded(lambda m, x: x + (again(m.a, x) if recompute else m.a(x)), a=block)
    expected = ONES + ONES @ block.b.weight.detach()
    for name in ("a", "a.b"):
        assert torch.allclose(sink.values[0, Kind.GRAD_INPUT, name, 0], expected)
    assert torch.equal(sink.values[0, Kind.GRAD_OUTPUT, "a.b", 0], ONES)


class Later(torch.autograd.Function):
    """As ``CheckpointWithoutOutput``: recomputed by a hook of what uses the output."""

    @staticmethod
    def forward(ctx, recompute, run, x):
        def again(grad):
            ctx.x = x.detach().requires_grad_()
            with torch.enable_grad():
                ctx.output = run(ctx.x)

        recompute.append(again)
        return run(x)

    @staticmethod
    def backward(ctx, grad):
        torch.autograd.backward(ctx.output, grad)
        return None, None, ctx.x.grad


def _twice_later(self, x):
    for _ in range(2):
        recompute = []
        (x := Later.apply(recompute, self.b, x) * 1.0).register_hook(recompute[0])
    return x


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: again(lambda x: self.b(self.b(x)), x),
        lambda self, x: again(self.b, again(self.b, x)),
        lambda self, x: again(self.b, self.b(x)),
        _twice_later,
    ],
)
def test_a_recomputed_module_that_runs_twice(forward):
    """Both runs keep their names, however they are recomputed."""
    block = Function(lambda self, x: self.b(self.b(x)), b=linear())
    _, plain, _ = recorded(lambda m, x: m.a(x), a=block)
    _, sink, _ = recorded(lambda m, x: m.a(x), a=Function(forward, b=block.b))
    assert sorted(sink.values) == sorted(plain.values)
    for place in itertools.product([0], GRADIENTS, ("a.b", "a.b#1"), [0]):
        assert torch.allclose(sink.values[place], plain.values[place])


def test_a_module_that_is_recomputed_twice():
    """A block is recomputed, and a part of it once more: that is still the first run."""
    block = Function(lambda self, x: again(self.b, x), b=linear())
    _, sink, _ = recorded(lambda m, x: again(m.a, x), a=block)
    assert "a.b" in sink.names(Kind.GRAD_OUTPUT)
    assert "a.b#1" not in sink.names(Kind.GRAD_OUTPUT)


@pytest.mark.parametrize("recompute", [False, True])
def test_one_forward_one_backward(recompute):
    """1F1B: each tensor knows its microbatch, also where blocks run again amid another one."""
    model, sink, numbers = Model(recompute=recompute), Recorder(), (12, 10, 11)
    with tapped([model], sink, microbatches=numbers):
        first = model(batch(0)[0], labels=batch(0)[1])
        second = model(batch(1)[0], labels=batch(1)[1])
        first.backward()
        third = model(batch(2)[0], labels=batch(2)[1])
        second.backward()
        third.backward()
    for seed, number in enumerate(numbers):
        for (kind, name), value in by_hand(Model(), seed=seed).items():
            assert torch.equal(sink.values[number, kind, name, 0], value.detach()), (number, name)


def test_chunks_count_their_microbatches_apart():
    """Virtual pipeline: two chunks on one rank, each at its own microbatch."""
    torch.manual_seed(1)
    first = Function(lambda self, x: self.layers[0](x), layers=nn.ModuleList([Block(3, 1)]))
    second = Function(
        lambda self: self.layers[0](self.received).sum(), layers=nn.ModuleList([Block(3, 3)])
    )
    first.post_process = False
    sink = Recorder()
    with tapped([first, second], sink, microbatches=[5, 6]):
        middles = [first(leaf(2, 3)), first(leaf(2, 3))]
        for middle in middles:
            second.received = middle  # as ``set_input_tensor`` does
            second().backward()
    for number in (5, 6):
        for layer in ("layers.0", "layers.2"):
            for kind in (Kind.INPUT, Kind.OUTPUT, *GRADIENTS):
                assert (number, kind, layer, 0) in sink.values
    outputs = [place for place in sink.values if place[1:3] == (Kind.OUTPUT, "model")]
    assert outputs == [(5, Kind.OUTPUT, "model", 0), (6, Kind.OUTPUT, "model", 0)]


def test_spans_and_identities_are_not_captured():
    """A block of layers depends on the stage; Megatron's ``IdentityOp`` stands for nothing."""
    decoder = Function(
        lambda self, x: self.layers[0](self.skip(x)),
        layers=nn.ModuleList([Block(3, 1)]),
        skip=IdentityOp(),
    )
    _, sink, _ = recorded(lambda m, x: m.decoder(x), decoder=decoder)
    names = {place[2] for place in sink.values}
    assert not names & {"decoder", "decoder.layers", "decoder.skip"}
    assert "decoder.layers.0" in names


@pytest.mark.parametrize("fail_on", ["tensor", Kind.GRAD_OUTPUT, Kind.GRAD_INPUT])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_broken_sink_does_not_break_training(fail_on, recompute):
    """The step ends with the same bits; the error is told once, and the tap is silent."""
    plain, traced = Model(recompute=recompute), Model(recompute=recompute)
    sink, errors = Recorder(), []
    sink.fail_on = fail_on
    losses = run(plain), run(traced, sink, errors=errors)
    assert [str(error) for error in errors] == ["the sink broke"]
    assert torch.equal(*losses)
    for a, b in zip(plain.parameters(), traced.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_an_error_of_the_model_stays_the_models():
    """Tracing neither hides it nor reports it as its own."""

    def compute(self, x):
        raise ValueError("the model broke")

    errors = []
    model = Function(compute)
    with (
        pytest.raises(ValueError, match="the model broke"),
        tapped([model], Recorder(), (0,), errors),
    ):
        model(leaf(1))
    assert errors == []
    assert not model._forward_pre_hooks


def test_replaced_values_go_on_and_gradients_flow_back():
    """Isolation: the next module computes with other values, the graph stays whole."""
    model, sink = Model(), Recorder()
    place = (0, Kind.OUTPUT, "layers.0.first", 0)
    values = torch.randn(2, 5, 6)
    sink.instead[place] = values
    run(model, sink)
    assert not torch.equal(sink.values[place], values)  # compared as it was computed
    assert torch.equal(sink.values[0, Kind.OUTPUT, "layers.0.act", 0], nn.GELU()(values))
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_replaced_gradients_go_on():
    """Backward isolation: what a module passes on comes from the gradient that was put in."""
    model, sink = Model(), Recorder()
    sink.instead[0, Kind.GRAD_OUTPUT, "layers.1.second", 0] = torch.ones(2, 5, 6)
    run(model, sink)
    expected = torch.ones(2, 5, 6) @ model.layers[1].second.weight.detach()
    assert torch.allclose(sink.values[0, Kind.GRAD_INPUT, "layers.1.second", 0], expected)


def test_a_tap_that_cannot_be_attached_leaves_no_hook(monkeypatch):
    """Some hooks are in place already when it fails."""
    model = Model()
    tap = tapped([model], Recorder())
    attach = ModuleTap._attach

    def attach_some(self, state, name, module, names):
        if name == "output_layer":
            raise RuntimeError("no such attribute")
        attach(self, state, name, module, names)

    monkeypatch.setattr(ModuleTap, "_attach", attach_some)
    with pytest.raises(RuntimeError, match="no such"), tap:
        pass
    assert_untouched(model)


def test_one_hook_that_cannot_be_removed_keeps_no_other():
    """The first error is told, and all others are gone."""

    class Stuck:
        def remove(self):
            raise RuntimeError("stuck")

    model = Model()
    tap = tapped([model], Recorder())
    tap.__enter__()
    tap._handles = [Stuck(), *tap._handles, Stuck()]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="stuck"):
            tap.__exit__()
    assert_untouched(model)
