# SPDX-License-Identifier: Apache-2.0
"""A perturbed replay is one epsilon away from the reference."""

import dataclasses
import types

import pytest
import torch

from megatron_ttrace.compare.tolerance import SAFETY, epsilon
from megatron_ttrace.cpu.te import offering, quantize
from megatron_ttrace.mcore.names import canonical_names
from megatron_ttrace.run.perturb import Spread, perturb, perturbed, split_head, step_of_loss
from tests.capture.recorder import Model, batch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_perturb_moves_every_element_by_about_an_epsilon(dtype):
    """Up or down at random, in the tensor's own dtype."""
    ones = torch.ones(1000, dtype=dtype)
    moved = perturb(ones, torch.Generator().manual_seed(1))
    assert moved.dtype == dtype
    change = (moved.double() - 1) / epsilon(dtype)
    assert set(change.tolist()) <= {-1.0, 1.0}
    assert 0.4 < float((change > 0).double().mean()) < 0.6


def run(model, seed):
    """The loss of a perturbed step, and the gradients of the parameters."""
    ids, labels = batch()
    with perturbed([canonical_names(model)], seed):
        loss = model(ids, labels=labels)
        loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]


def test_a_seed_is_one_perturbation():
    """The same seed gives the same replay, another seed another one."""
    first, again, different = (run(Model(), seed) for seed in (1, 1, 2))
    assert torch.equal(first[0], again[0])
    assert all(map(torch.equal, first[1], again[1]))
    assert not all(map(torch.equal, first[1], different[1]))


def test_the_replay_stays_close():
    """All gradients move, by no more than rounding."""
    plain = Model()
    ids, labels = batch()
    plain(ids, labels=labels).backward()
    _, gradients = run(Model(), 1)
    for expected, gradient in zip(plain.parameters(), gradients, strict=True):
        distance = float((gradient - expected.grad).norm() / expected.grad.norm())
        assert 0 < distance < 1e-4


@pytest.mark.parametrize("emulated", [True, False])
def test_fp8_is_rounded_with_another_scale(monkeypatch, emulated):
    """Scales are perturbed too, unless FP8 is the hardware's."""
    monkeypatch.setattr(offering, "_emulated", emulated)
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    plain = quantize.current_scaling(x, torch.float8_e4m3fn)
    with perturbed([canonical_names(Model())], 1):
        replay = quantize.current_scaling(x, torch.float8_e4m3fn)
    assert torch.equal(plain, replay) != emulated
    assert torch.equal(quantize.current_scaling(x, torch.float8_e4m3fn), plain)


def test_muon_rounds_to_bfloat16():
    """Where it says so, its momentum gets another rounding in a replay, and none afterwards."""

    class Muon:
        def __init__(self, precision):
            self.fp32_matmul_prec = precision

        def orthogonalize(self, p, grad, **group):
            return grad

    ones = torch.ones(8, 8)
    for precision, size in (("medium", 2.0**-7), ("high", 0.0)):
        inner = Muon(precision)
        optimizer = types.SimpleNamespace(optimizer=inner)
        with perturbed([canonical_names(Model())], 1, optimizer):
            assert float((inner.orthogonalize(None, ones) - 1).abs().max()) == size
        assert torch.equal(inner.orthogonalize(None, ones), ones)


def test_no_hook_is_left():
    """No hook is left, whatever happens inside."""
    model = Model()
    with pytest.raises(ValueError, match="inside"), perturbed([canonical_names(model)], 1):
        raise ValueError("inside")
    assert all(not module._forward_hooks for module in model.modules())


class Head(torch.nn.Module):
    """Megatron's call of an output layer: its own weight or the embedding's."""

    def __init__(self, weight):
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def forward(self, input_, weight=None):
        return input_ @ (self.weight if weight is None else weight).T, None


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_heads_gradient_is_added_up_in_two_parts(dtype, tied):
    """In 16 bits only, where values that are small beside the target's row are lost."""
    step = epsilon(dtype)
    above = torch.tensor([[1.0, 0.3 * step, 0.3 * step]], dtype=dtype)
    head = Head(torch.ones(3, 1, dtype=dtype))
    steps = set()
    for seed in range(16):
        hidden = torch.ones(1, 1, dtype=dtype, requires_grad=True)
        handle = split_head(head, torch.Generator().manual_seed(seed))
        logits, _ = head(hidden, weight=head.weight.detach() if tied else None)
        logits.backward(above)
        handle.remove()
        steps.add(round(float(hidden.grad.double() - 1) / step, 1))
    # Behind the first word two small ones count together; behind the second each is lost.
    assert len(steps) == 1 if dtype is torch.float32 else steps == {0.0, 1.0}


@pytest.fixture
def split():
    """A head, its input and its output's gradient, and the generator that they are drawn from."""
    generator = torch.Generator().manual_seed(1)
    head = Head(torch.randn(64, 8, generator=generator).bfloat16())
    hidden = torch.randn(4, 8, generator=generator).bfloat16().requires_grad_()
    return head, hidden, torch.randn(4, 64, generator=generator).bfloat16(), generator


def test_others_that_read_the_hidden_states_keep_their_share(split):
    """The head's part of the gradient changes by rounding; the rest stays."""
    head, hidden, above, generator = split
    handle = split_head(head, generator)
    logits, _ = head(hidden)
    ((logits * above).sum() + (8 * hidden).sum()).backward()
    handle.remove()
    expected = (above @ head.weight).detach() + 8
    assert 0 < float((hidden.grad - expected).float().norm() / expected.float().norm()) < 0.02


def parameters_of(names, spread):
    """The parameters of a model during a replay."""
    model = Model()
    with perturbed([names(model)], 1, spread=spread):
        return {name: p.detach().clone() for name, p in canonical_names(model).parameters.items()}


def test_replicas_are_perturbed_alike():
    """On several ranks: whatever else a rank holds, and other parts of a tensor differently."""

    def some(model):
        names = canonical_names(model)
        return dataclasses.replace(
            names, parameters={n: p for n, p in names.parameters.items() if "first" in n}
        )

    model = canonical_names(Model())
    parts = {name: number for number, name in enumerate(model.parameters)}
    other_parts = {name: number + 100 for name, number in parts.items()}
    everything, few, elsewhere = (
        parameters_of(names, Spread(of, True, lambda change: None))
        for names, of in ((canonical_names, parts), (some, parts), (canonical_names, other_parts))
    )
    name = "layers.0.first.weight"
    assert not torch.equal(everything[name], model.parameters[name])
    assert torch.equal(everything[name], few[name])
    assert not torch.equal(everything[name], elsewhere[name])


@pytest.mark.parametrize("ends", [True, False])
def test_only_the_last_stage_perturbs_the_loss(ends):
    """Hidden states between stages are no loss."""
    model = Model()
    ids, labels = batch()
    parts = dict.fromkeys(canonical_names(model).parameters, 0)
    seen = []
    model.register_forward_hook(lambda module, args, output: seen.append(output))
    with perturbed([canonical_names(model)], 1, spread=Spread(parts, ends, lambda change: None)):
        loss = model(ids, labels=labels)
    assert (loss is seen[0]) is not ends


def test_ranks_add_up_what_changed_of_the_heads_gradient(split):
    """Each rank splits its part of the vocabulary; hidden states are replicas."""
    head, hidden, above, generator = split
    seen = []

    def add_up(change):
        seen.append(change.clone())
        change.zero_()  # the other rank's is the opposite

    handle = split_head(head, generator, Spread({}, True, add_up))
    head(hidden)[0].backward(above)
    handle.remove()
    assert seen[0].abs().max() > 0
    assert torch.equal(hidden.grad, (above @ head.weight).detach())


@pytest.mark.parametrize("rounded", [True, False])
def test_a_step_of_a_loss_that_rounds(rounded):
    """One element moves, by a part of a step, if the gradient of float32 logits is in bfloat16."""
    generator = torch.Generator().manual_seed(1)
    head = torch.nn.Identity()
    step_of_loss(head, generator)
    logits = torch.randn(3, 2, 5, generator=generator, requires_grad=True)
    gradient = torch.randn(3, 2, 5, generator=generator)
    gradient = gradient.bfloat16().float() if rounded else gradient
    (output,) = head((logits * 1,))
    output.backward(gradient)
    changed = logits.grad != gradient
    assert int(changed.sum()) == rounded
    if rounded:
        ratio = float(logits.grad[changed] / gradient[changed])
        assert ratio == pytest.approx(1 + epsilon(torch.bfloat16) / SAFETY)
        row = changed.flatten(0, 1).any(dim=1)
        assert gradient.flatten(0, 1)[row].abs().max() == gradient[changed].abs()


def test_a_language_model_in_another_model():
    """Nothing would move in 16 bits, and tolerances would have no room for rounding."""

    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.language_model = Model()

        def forward(self, ids, labels):
            return self.language_model(ids, labels=labels), labels

    ids, labels = batch()
    losses = []
    for seed in (0, 1):
        model = Outer().bfloat16()
        with perturbed([canonical_names(model)], seed):
            losses.append(model(ids, labels=labels)[0].detach())
    assert 0 < float((losses[1] - losses[0]).norm() / losses[0].norm()) < 0.1


def test_a_float32_output_of_16_bit_weights():
    """With float32 residuals: what reads the embedding rounds it, so it moves by a 16-bit step."""

    class Wide(Model):
        def __init__(self):
            super().__init__()
            self.bfloat16()
            self.embedding.register_forward_hook(lambda module, args, output: output.float())
            self.seen = []

        def forward(self, ids):
            self.seen.append(self.embedding(ids).detach())

    ids, _ = batch()
    model = Wide()
    for seed in (0, 1):
        with perturbed([canonical_names(model)], seed):
            model(ids)
    before, after = model.seen
    assert after.dtype == torch.float32
    changes = ((after - before) / before).abs()[before != 0]
    assert changes.max() == pytest.approx(epsilon(torch.bfloat16), rel=1e-3)


def test_what_autocast_computes_moves_by_its_own_step():
    """In a float32 model, and once: not what contains it, too."""

    class Leaf(torch.nn.Module):
        def forward(self, x):
            return x.bfloat16(), None

    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.leaf = Leaf()

        def forward(self, x):
            self.seen = self.leaf(x)
            return self.seen

    model = Model()
    model.outer = Outer()
    x = torch.ones(1000)
    for seed, numbers in ((0, 1), (1, 2)):
        with perturbed([canonical_names(model)], seed):
            moved, other = found = model.outer(x)
        assert found is model.outer.seen
        assert other is None
        assert (moved.dtype, len(moved.unique())) == (torch.bfloat16, numbers)


def test_the_heads_rows_are_rounded_as_autocast_does(split):
    """Its weight is float32, what enters it is not."""
    words, hidden, above, generator = split
    head = Head(words.weight.detach().float())
    split_head(head, generator)
    head.forward = lambda x: (x @ head.weight.bfloat16().T, None)
    head(hidden)[0].backward(above)
    assert hidden.grad.isfinite().all()


class Critic(Head):
    """A fork's: called by another keyword, it returns a plain tensor."""

    def forward(self, hidden_states):
        return super().forward(hidden_states)[0]


@pytest.mark.parametrize(("rows", "moves"), [(1, False), (64, True)])
def test_a_head_of_a_fork(split, rows, moves):
    """One that returns a single number has no vocabulary to be summed in another order."""
    words, _, above, generator = split
    head = Critic(words.weight.detach()[:rows].clone())
    gradients = []
    for handle in (None, split_head(head, generator)):
        hidden = split[1].detach().requires_grad_()
        head(hidden_states=hidden).backward(above[:, :rows])
        gradients.append(hidden.grad)
        assert handle is None or handle.remove() is None
    assert torch.equal(*gradients) is not moves


def test_heads_without_products(split):
    """Several layers, or what returns none of its inputs' size."""
    _, hidden, _, generator = split
    for head in (torch.nn.Sequential(torch.nn.Linear(8, 1)), torch.nn.Identity()):
        split_head(head, generator)
        step_of_loss(head, generator)
        head.bfloat16()(hidden).sum().backward()


def test_an_embedding_by_another_name():
    """Without it nothing moves the forward pass in 16 bits."""

    class Other(Model):
        def __init__(self):
            super().__init__()
            self.wte = self.embedding
            del self.embedding

        def forward(self, ids):
            return self.wte(ids)

    ids, _ = batch()
    model = Other().bfloat16()
    outputs = []
    for seed in (0, 1):
        with perturbed([canonical_names(model)], seed):
            outputs.append(model.wte(ids).detach())
    assert not torch.equal(*outputs)
