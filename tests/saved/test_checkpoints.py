# SPDX-License-Identifier: Apache-2.0
"""Two checkpoints, tensor by tensor."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.mcore.checkpoints.stored import Checkpoint, Format, Stored
from megatron_ttrace.saved import checkpoints
from megatron_ttrace.saved.checkpoints import Same
from megatron_ttrace.trace.errors import ExitCode
from megatron_ttrace.trace.states import Item, State


def held(data):
    """A weight."""
    return Stored(tuple(data.shape), lambda index: data[index])


def holding(tensors=None, numbers=None, buckets=None, format=Format.TORCH_DIST):
    """A checkpoint; names without a state are weights."""
    items = {
        (Item(State.WEIGHT, name) if isinstance(name, str) else Item(*name)): stored
        for name, stored in (tensors or {}).items()
    }
    return Checkpoint(format, items, numbers=numbers or {}, unread=buckets or {})


def compare(a, b):
    """The tensors of two checkpoints of weights."""
    return checkpoints.compare(holding(a), holding(b)).tensors


def wrong_one(compared):
    """The one tensor of a comparison that is not the same."""
    (wrong,) = (tensor for tensor in compared.tensors if not tensor.same.is_same)
    return wrong


@given(st.integers(0, 19))
def test_any_element(wrong):
    """The same, or not if any element differs."""
    data = torch.randn(5, 4)
    a = {"w": held(data)}
    assert [tensor.same for tensor in compare(a, {"w": held(data.clone())})] == [Same.SAME]
    other = data.clone()
    other.view(-1)[wrong] += 1
    (wrong_tensor,) = compare(a, {"w": held(other)})
    assert wrong_tensor.same is Same.DIFFERENT
    assert wrong_tensor.rel_err == pytest.approx(float(1 / data.norm()), rel=1e-4)


WIDE, WORDS = torch.randn(4, 4), torch.randn(8, 3)
NAN = torch.tensor([1.0, float("nan")])
INTEGERS = torch.tensor([1, 2, 3])
EMBEDDING = "embedding.word_embeddings.weight"


@pytest.mark.parametrize(
    ("name", "a", "b", "same", "note"),
    [
        # Rounded to the narrower dtype, they must be bitwise equal.
        ("w", WIDE, WIDE.bfloat16(), Same.ROUNDED, "bfloat16 and float32"),
        ("w", WIDE, (WIDE * 1.1).bfloat16(), Same.DIFFERENT, "bfloat16 and float32"),
        # Integers of different dtypes are compared by value, and never wrapped.
        *(
            ("w", wide, INTEGERS.to(narrow), same, "int64")
            for narrow in (torch.int8, torch.uint16, torch.int32)
            for wide, same in ((INTEGERS, Same.ROUNDED), (INTEGERS + 2**32, Same.DIFFERENT))
        ),
        ("w", INTEGERS, INTEGERS.bfloat16(), Same.ROUNDED, "bfloat16 and int64"),
        # Without elements, layers, or dims to cut.
        ("w", torch.empty(0, 3), torch.empty(0, 3), Same.SAME, ""),
        ("decoder.layers.w", torch.empty(0), torch.empty(0), Same.SAME, ""),
        ("w", torch.tensor(1.5), torch.tensor(1.5), Same.SAME, ""),
        # NaN in both is the same, in one of them it is not.
        ("w", NAN, NAN, Same.SAME, ""),
        ("w", NAN, torch.ones(2), Same.DIFFERENT, ""),
        # Rows that only one has are padding, and named.
        (EMBEDDING, WORDS, WORDS[:6], Same.SAME, "padded rows"),
        ("output_layer.bias", WORDS[:, 0], WORDS[:6, 0], Same.SAME, "padded rows"),
        ("w", torch.ones(2, 2), torch.ones(2, 3), Same.SHAPE, "[2, 2]"),
    ],
)
def test_two_tensors(name, a, b, same, note):
    """Whichever is the first."""
    for first, second in ((a, b), (b, a)):
        (tensor,) = compare({name: held(first)}, {name: held(second)})
        assert tensor.same is same
        assert note in tensor.note
        assert (tensor.rel_err == 0) is same.is_same
        assert tensor.rel_err == tensor.rel_err, "it is not NaN"


def test_layers_in_a_stack():
    """Layers on their own are parts of the other checkpoint's stack, both ways."""
    data = torch.randn(3, 4, 2)
    stack = {"decoder.layers.mlp.w": held(data)}
    alone = {f"decoder.layers.{n}.mlp.w": held(data[n]) for n in range(3)}
    for first, second in ((stack, alone), (alone, stack)):
        tensors = list(compare(first, second))
        assert [tensor.name for tensor in tensors] == list(alone)
        assert {tensor.same for tensor in tensors} == {Same.SAME}
    alone["decoder.layers.1.mlp.w"] = held(data[0])
    tensors = [tensor.same for tensor in compare(stack, alone)]
    assert tensors == [Same.SAME, Same.DIFFERENT, Same.SAME]


def test_what_is_not_there():
    """Other names are differences."""
    square = held(torch.ones(2, 2))
    same = {tensor.name: tensor.same for tensor in compare({"a": square}, {"b": square})}
    assert same == {"a": Same.ONLY_A, "b": Same.ONLY_B}


def trained(scale=1.0, *, numbers=None, without=(), format=Format.TORCH_DIST):
    """A checkpoint of two parameters with their optimizer state; ``scale`` is that of moments."""
    main = torch.arange(12.0).view(2, 6) / 7
    states = {
        (State.WEIGHT, "decoder.layers.w"): held(main.bfloat16()),
        (State.MAIN, "decoder.layers.w"): held(main),
        (State.EXP_AVG, "decoder.layers.w"): held(main * scale),
        (State.OTHER, "decoder.layers.w", "GG"): held(main),
        (State.WEIGHT, "router.expert_bias"): held(torch.ones(3)),
    }
    kept = {name: stored for name, stored in states.items() if name[0] not in without}
    numbers = {"iteration": 4, "opt_param_scheduler.num_steps": 8} | (numbers or {})
    return holding(kept, numbers=numbers, format=format)


def test_optimizer_state():
    """A moment that differs in one layer is named; everything else is compared, too."""
    compared = checkpoints.compare(trained(), trained())
    assert compared.code is ExitCode.EQUIVALENT
    assert len(compared.tensors) == 5
    data = torch.arange(12.0).view(2, 6) / 7
    data[1, 2] += 1
    other = trained()
    other.tensors[Item(State.EXP_AVG, "decoder.layers.w")] = held(data)
    compared = checkpoints.compare(trained(), other)
    assert compared.code is ExitCode.DIVERGED
    wrong = wrong_one(compared)
    assert (wrong.name, wrong.state, wrong.note) == ("decoder.layers.w", "exp_avg", "layers 1 of 2")
    assert checkpoints.compare(trained(), other, weights_only=True).code is ExitCode.EQUIVALENT


def test_main_weights_of_one_side():
    """Of main weights that differ, those that do not round to the weights are wrong."""
    other = trained()
    other.tensors[Item(State.MAIN, "decoder.layers.w")] = held(torch.ones(2, 6))
    for a, b, side in ((trained(), other, "B"), (other, trained(), "A")):
        wrong = wrong_one(checkpoints.compare(a, b))
        assert (wrong.state, wrong.same) == (State.MAIN, Same.DIFFERENT)
        assert wrong.note.endswith(f"in {side} they do not round to the weights")
        assert "round" not in checkpoints.compare(other, other).tensors[1].note


def test_no_optimizer_on_one_side():
    """One line that lists its states, and a difference; not for a format of weights only."""
    states = set(State) - {State.WEIGHT}
    compared = checkpoints.compare(trained(), trained(without=states))
    assert compared.code is ExitCode.DIVERGED
    lacking = wrong_one(compared)
    assert (lacking.name, lacking.same) == ("all parameters", Same.ONLY_A)
    assert lacking.state == "main weight, exp_avg, GG"
    exported = trained(without=states, format=Format.SAFETENSORS)
    compared = checkpoints.compare(trained(), exported)
    assert (compared.code, len(compared.notices)) == (ExitCode.EQUIVALENT, 1)


def test_numbers():
    """Those that differ, with both values."""
    other = trained(numbers={"opt_param_scheduler.num_steps": 4, "consumed_train_samples": 3})
    compared = checkpoints.compare(trained(), other)
    assert compared.code is ExitCode.DIVERGED
    assert [(n.name, n.a, n.b) for n in compared.numbers] == [
        ("opt_param_scheduler.num_steps", "8", "4"),
        ("consumed_train_samples", None, "3"),
    ]


def test_a_number_that_is_nan():
    """NaN in both is the same."""
    other = trained(numbers={"loss_scale": float("nan")})
    again = trained(numbers={"loss_scale": float("nan")})
    assert checkpoints.compare(other, again).code is ExitCode.EQUIVALENT
    assert checkpoints.compare(trained(numbers={"loss_scale": 1.0}), again).numbers


def test_groups_of_one_side():
    """A group that only one checkpoint lists belongs to a stage; a second variant does not."""
    group = {"param_groups[wd_mult=1.0].lr": 0.1}
    compared = checkpoints.compare(trained(numbers=group), trained())
    assert (compared.code, len(compared.notices)) == (ExitCode.EQUIVALENT, 1)
    other = trained(numbers=group | {"param_groups[wd_mult=1.0]#2.lr": 0.2})
    assert checkpoints.compare(trained(numbers=group), other).code is ExitCode.DIVERGED


def test_a_stack_with_more_layers():
    """A layer of a stack that the other checkpoint does not have is not passed over."""
    data = torch.randn(3, 4)
    stack = {"decoder.layers.w": held(data)}
    alone = {f"decoder.layers.{n}.w": held(data[n]) for n in range(2)}
    for a, b, same in ((stack, alone, Same.ONLY_A), (alone, stack, Same.ONLY_B)):
        tensors = compare(a, b)
        assert [tensor.same for tensor in tensors] == [Same.SAME, Same.SAME, same]
        assert tensors[-1].note == "4 of 12 elements"


def bucket(data, *padding):
    """A bucket of the distributed optimizer."""
    return Stored(tuple(data.shape), lambda index: data[index], padding=padding)


def test_buckets():
    """The same buckets are compared, but not what is between parameters in both."""
    data = torch.randn(128)
    garbage, wrong = data.clone(), data.clone()
    garbage[40:64] = torch.nan
    wrong[3] += 1
    a = holding({"w": held(data)}, buckets={"b.param": bucket(data, (32, 64))})
    for other, padding, code in (
        (data, (32, 64), ExitCode.EQUIVALENT),
        (garbage, (40, 64), ExitCode.EQUIVALENT),
        (garbage, (50, 64), ExitCode.DIVERGED),
        (wrong, (32, 64), ExitCode.DIVERGED),
    ):
        b = holding({"w": held(data)}, buckets={"b.param": bucket(other, padding)})
        compared = checkpoints.compare(a, b)
        assert compared.code is code
        assert compared.tensors[-1].state == "param"


def test_buckets_of_other_layouts():
    """They are not passed over: the answer is that they could not be compared."""
    data = torch.randn(128)
    weights = {"w": held(data)}
    states = weights | {(State.MAIN, "w"): held(data)}
    a = holding(weights, buckets={"b.param": bucket(data)})
    for other in (holding(weights, buckets={"c.param": bucket(data)}), holding(states)):
        for pair in ((a, other), (other, a)):
            compared = checkpoints.compare(*pair)
            assert compared.code is ExitCode.COULD_NOT_CHECK
            assert [tensor.same for tensor in compared.tensors] == [Same.SAME, Same.NOT_COMPARED]
            assert checkpoints.compare(*pair, weights_only=True).code is ExitCode.EQUIVALENT
    compared = checkpoints.compare(a, holding(weights))
    assert compared.code is ExitCode.DIVERGED
    assert compared.tensors[-1].same is Same.ONLY_A


def test_states_beside_buckets():
    """States outside of buckets that are the same in both must be in both, too."""
    data = torch.randn(128)
    buckets = {"b.param": bucket(data)}
    a = holding({"w": held(data), (State.EXP_AVG, "w"): held(data)}, buckets=buckets)
    b = holding({"w": held(data)}, buckets=buckets)
    for pair, same in (((a, b), Same.ONLY_A), ((b, a), Same.ONLY_B)):
        compared = checkpoints.compare(*pair)
        assert compared.code is ExitCode.DIVERGED
        wrong = wrong_one(compared)
        assert (wrong.state, wrong.same) == ("exp_avg", same)
