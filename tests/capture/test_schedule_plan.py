# SPDX-License-Identifier: Apache-2.0
"""Layers that run in pieces, two microbatches in turns, show what layers that are called show."""

import ast
import functools
import importlib.util
import types
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_ttrace.capture.schedule_plan import LAYER_INPUTS, MTP_INPUTS
from megatron_ttrace.trace.records import Kind
from tests.capture.recorder import Recorder, batch, tapped

SIZE = 6


class Node:
    """A piece of work: detaches its inputs and runs its own backward pass, as Megatron's does."""

    def __init__(self, compute):
        self.detached, self.before = (), ()
        self.forward_func = lambda *inputs: compute(self, *inputs)
        self.backward_func = lambda *given: self.run_backward(*given)

    def detach(self, tensor):
        leaf = tensor.detach().requires_grad_(tensor.requires_grad)
        self.before, self.detached = (*self.before, tensor), (*self.detached, leaf)
        return leaf

    def forward(self, *inputs):
        self.inputs = [one.detach().requires_grad_(one.requires_grad) for one in inputs]
        self.output = self.forward_func(*self.inputs)
        return self.output

    def run_backward(self, outputs, gradients):
        held = [leaf.grad for leaf in self.detached]
        torch.autograd.backward((*outputs, *self.before), (*gradients, *held), retain_graph=True)

    def backward(self, gradient):
        self.backward_func((self.output,), (gradient,))
        return self.inputs[0].grad if self.inputs else None


class Moe(nn.Module):
    """Experts without a dispatcher."""

    token_dispatcher = None

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def route(self, x):
        return self.router(x)

    def postprocess(self, x):
        return x * 0.5

    def forward(self, x):
        return self.postprocess(self.experts(x * self.route(x)))


class Layer(nn.Module):
    """Attention, then experts."""

    def __init__(self, number, normed):
        super().__init__()
        self.layer_number, self.normed = number, normed
        self.attention, self.norm, self.mlp = nn.Linear(SIZE, SIZE), nn.LayerNorm(SIZE), Moe()

    def _forward_attention(self, hidden_states, rotary_pos_emb):
        return hidden_states + self.attention(hidden_states) * rotary_pos_emb

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        context=None,
        context_mask=None,
        rotary_pos_emb=None,
    ):
        x = self._forward_attention(hidden_states=hidden_states, rotary_pos_emb=rotary_pos_emb)
        return x + self.mlp(self.normed(self, x)), context


class LayerPlan:
    """The pieces of a layer for one microbatch."""

    def __init__(self, model, layer, state, *, last):
        self.layer = layer

        def attend(node, x):
            if layer.layer_number == 2:
                state.kept = x  # with the graph: another piece contributes to its gradient
            x = layer._forward_attention(hidden_states=x, rotary_pos_emb=state.rotary_pos_emb)
            normed = model.normed(layer, x)
            self.residual = node.detach(x)
            return normed * layer.mlp.route(normed)

        def combine(_, x):
            x = self.residual + layer.mlp.postprocess(x)
            return model.decoder.final_layernorm(x) if last else x

        self.attn = Node(attend)
        self.mlp = Node(lambda _, x: layer.mlp.experts(x))
        self.moe_combine = Node(combine)
        self.moe_dispatch = object()
        self.pieces = self.attn, self.mlp, self.moe_combine


class Plan:
    """The pieces of a model for one microbatch."""

    def __init__(self, model, ids, labels):
        self.state = types.SimpleNamespace(rotary_pos_emb=model.rotary)
        self.pre_process = Node(lambda _: model.embedding(ids))
        self.post_process = Node(lambda _, x: model.loss(x, labels, self.state.kept))
        layers = model.decoder.layers
        self.layers = [
            LayerPlan(model, layer, self.state, last=layer is layers[-1]) for layer in layers
        ]
        self.pieces = [
            self.pre_process,
            *(piece for layer in self.layers for piece in layer.pieces),
            self.post_process,
        ]

    def num_layers(self):
        return len(self.layers)

    def get_layer(self, index):
        return self.layers[index]


class Model(nn.Module):
    """Called, or run by its plans."""

    def __init__(self, *, in_pieces, recompute=False):
        super().__init__()
        torch.manual_seed(0)
        self.recompute = recompute
        self.config = types.SimpleNamespace(overlap_moe_expert_parallel_comm=in_pieces)
        self.embedding = nn.Embedding(11, SIZE)
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList(Layer(number + 1, self.normed) for number in range(3))
        self.decoder.final_layernorm = nn.LayerNorm(SIZE)
        self.output_layer = nn.Linear(SIZE, 11, bias=False)
        self.rotary = torch.randn(SIZE)

    def normed(self, layer, x):
        return checkpoint(layer.norm, x, use_reentrant=True) if self.recompute else layer.norm(x)

    def loss(self, x, labels, kept):
        logits = self.output_layer(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) + kept.mean()

    def forward(self, ids, *, labels):
        x = kept = self.embedding(ids)
        for layer in self.decoder.layers:
            kept = x if layer.layer_number == 2 else kept
            x, _ = layer(hidden_states=x, **NOTHING, rotary_pos_emb=self.rotary)
        return self.loss(self.decoder.final_layernorm(x), labels, kept)

    def build_schedule_plan(self, ids, *, labels):
        return Plan(self, ids, labels)


NOTHING = {"attention_mask": None, "context": None, "context_mask": None}


def forwards(plan):
    """Run a microbatch forward, piece by piece."""
    carried = ()
    for piece in plan.pieces:
        carried = (piece.forward(*carried),)
        yield


def backwards(plan):
    """Run a microbatch backward, piece by piece."""
    gradient = torch.ones(())
    for piece in reversed(plan.pieces):
        gradient = piece.backward(gradient)
        yield


def plans(model, microbatches):
    """A plan of each microbatch, when it is asked for."""
    for seed in range(microbatches):
        ids, labels = batch(seed)
        yield model.build_schedule_plan(ids, labels=labels)


def run_ahead(model, microbatches):
    """All plans are made before the first one runs."""
    run_in_pieces(model, microbatches, lambda *given: list(plans(*given)))


def run_in_pieces(model, microbatches, plans=plans):
    """Every microbatch's forward pass in turns with the backward pass of the one before."""
    before = None
    for plan in plans(model, microbatches):
        forward, backward = forwards(plan), backwards(before) if before else iter(())
        while [next(one, self) for one, self in ((backward, 0), (forward, 0))] != [0, 0]:
            pass
        before = plan
    list(backwards(before))


def traced(model, run, microbatches):
    """What a traced run shows."""
    sink = Recorder()
    with tapped([model], sink, range(10, 10 + microbatches)):
        run(model, microbatches)
    return sink


def call(model, microbatches):
    """One microbatch after the other."""
    for seed in range(microbatches):
        ids, labels = batch(seed)
        model(ids, labels=labels).backward()


@pytest.mark.parametrize("run", [run_in_pieces, run_ahead])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_same_as_called(run, recompute):
    """Every name, every value and gradient, each with its microbatch, and the parameters'."""
    called, in_pieces = (Model(in_pieces=p, recompute=recompute) for p in (False, True))
    expected = traced(called, call, 3).values
    found = traced(in_pieces, run, 3).values
    assert found.keys() == expected.keys()
    assert (12, Kind.GRAD_INPUT, "decoder.layers.2.mlp", 0) in found
    for place, value in expected.items():
        torch.testing.assert_close(found[place], value, msg=str(place))
    for (name, one), other in zip(called.named_parameters(), in_pieces.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)


def test_nothing_is_left_behind():
    """After the traced step the model's methods are its class's, and nothing is recorded."""
    model = Model(in_pieces=True)
    sink = traced(model, run_in_pieces, 2)
    count = len(sink.values)
    run_in_pieces(model, 1)
    assert len(sink.values) == count
    for module in model.modules():
        assert not {"build_schedule_plan", "route", "postprocess", "_forward_attention"} & set(
            vars(module)
        )
        assert not module._forward_pre_hooks


@pytest.mark.parametrize("place", ["decoder.layers.1", "decoder.layers.2", "decoder.layers.1.mlp"])
def test_a_modules_output_is_replaced(place):
    """Also where its forward was never called: what follows uses the other values."""
    model, sink = Model(in_pieces=True), Recorder()
    plain = traced(Model(in_pieces=True), run_in_pieces, 1).values
    zeros = torch.zeros_like(plain[10, Kind.OUTPUT, place, 0])
    sink.instead[10, Kind.OUTPUT, place, 0] = zeros
    with tapped([model], sink, [10]):
        run_in_pieces(model, 1)
    after = {1: "decoder.layers.2", 2: "decoder.final_layernorm"}
    name = after[int(place.split(".")[2])]
    seen = sink.values[10, Kind.INPUT, name, 0]
    assert torch.equal(seen, zeros) or "mlp" in place
    assert not torch.equal(seen, plain[10, Kind.INPUT, name, 0])
    assert torch.equal(sink.values[10, Kind.OUTPUT, place, 0], plain[10, Kind.OUTPUT, place, 0])


def test_a_gradient_that_is_wrong_shows():
    """A residual whose gradient is lost: behind the layer it is right, in the layer it is not."""

    def broken(self, outputs, gradients):
        for leaf in self.detached:
            leaf.grad.zero_()
        Node.run_backward(self, outputs, gradients)

    def faulty(model, microbatches):
        for plan in plans(model, microbatches):
            plan.layers[1].attn.run_backward = functools.partial(broken, plan.layers[1].attn)
            yield plan

    def run_faulty(model, microbatches):
        run_in_pieces(model, microbatches, faulty)

    right = traced(Model(in_pieces=True), run_in_pieces, 2).values
    wrong = traced(Model(in_pieces=True), run_faulty, 2).values
    differ = {place[1:3] for place in right if not torch.equal(right[place], wrong[place])}
    assert (Kind.GRAD_INPUT, "decoder.layers.1") in differ
    assert (Kind.GRAD_OUTPUT, "decoder.layers.1.mlp") not in differ
    assert (Kind.GRAD_INPUT, "decoder.layers.2") not in differ


@pytest.mark.parametrize(
    ("file", "function", "order"),
    [
        ("transformer_block", "layer", LAYER_INPUTS),
        ("multi_token_prediction", "self.layers", MTP_INPUTS),
    ],
)
def test_the_order_of_inputs_is_megatrons(file, function, order):
    """The installed release calls its layers with these arguments first, in this order."""
    root = Path(importlib.util.find_spec("megatron.core").submodule_search_locations[0])
    calls = [
        [keyword.arg for keyword in node.keywords]
        for node in ast.walk(ast.parse((root / "transformer" / f"{file}.py").read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).partition("[")[0] == function
        and any(keyword.arg == "hidden_states" for keyword in node.keywords)
    ]
    assert calls
    for arguments in calls:
        if "rotary_pos_cos" in arguments:
            known = [name for name in order if name in arguments]
            assert arguments[: len(known)] == known
