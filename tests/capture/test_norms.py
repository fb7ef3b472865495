# SPDX-License-Identifier: Apache-2.0
"""Norms of what functions are given and return in modules, in their first calls."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_ttrace.capture.calls import CallTap
from megatron_ttrace.trace.collectives import CallNorms, Norm, Phase
from tests.capture.test_calls import forget, made

assert forget
FILE = """
def forward(x, *more, scale=1.0, **others):
    out = inner([x, *more], others)
    x.zero_()
    return out, None, scale
def inner(parts, others):
    return sum(parts).mul_(2)
def fail(x):
    raise RuntimeError
def quiet(x):
    return None
"""
F, B = Phase.FORWARD, Phase.BACKWARD


def two(value: float) -> torch.Tensor:
    """Four elements, of norm two times the value."""
    return torch.full((2, 2), value)


def run(each_module: bool = False) -> Iterator[tuple[CallTap, dict[str, Any], list[Any]]]:
    """A tap, functions that it follows, and the module in which they run."""
    tap, place = CallTap(each_module=each_module), [("", None)]
    tap.start()
    functions = made(FILE, "core/m.py")
    tap.entered()
    tap.in_steps(lambda: place[0])
    yield tap, functions, place
    tap.stop()


def told(norms: tuple[CallNorms, ...]) -> list[tuple[str, str, Phase, Any, Any]]:
    """Name, module, part of the step, what was given and returned."""
    return [(c.function.partition(" ")[2], c.module, c.phase, c.given, c.returned) for c in norms]


def test_what_is_given_and_returned():
    """Before it is changed in place; also in lists, and as any arguments."""
    for tap, functions, place in run():
        functions["forward"](two(9.0))  # in no module
        place[0] = "layers.3.mlp", F
        functions["forward"](two(1.0), two(2.0), scale=3.0, other=two(1.0))
        functions["forward"](two(7.0))
        functions["quiet"](two(1.0))
        with pytest.raises(RuntimeError):
            functions["fail"](two(1.0))
        place[0] = "layers.4.mlp", F
        functions["forward"](two(7.0))
        place[0] = "layers.3.mlp", B
        functions["inner"]([two(1.0)], {})
        tap.stop()
        one, other, both, twice = (Norm(4, norm) for norm in (2.0, 4.0, 12.0, 4.0))
        assert told(tap.norms()) == [
            ("(forward)", "layers.3.mlp", F, (one, other), (both,)),
            ("(inner)", "layers.3.mlp", F, (one, other), (both,)),
            ("(inner)", "layers.3.mlp", B, (one,), (twice,)),
        ]


def test_each_module():
    """Of the reference, whose candidate may have any of them, however often a function ran."""
    for tap, functions, place in run(each_module=True):
        for layer in range(20):
            place[0] = f"layers.{layer}.mlp", F
            functions["inner"]([two(1.0)], {})
        tap.stop()
        assert [call.module for call in tap.norms()] == [f"layers.{n}.mlp" for n in range(20)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes(dtype):
    """Squares are added up in at least 32 bits."""
    for tap, functions, place in run():
        place[0] = "layers.3.mlp", F
        functions["inner"]([torch.full((4,), 1e10, dtype=dtype)], {})
        tap.stop()
        assert [call.returned[0].norm for call in tap.norms()] == [pytest.approx(4e10, rel=0.01)]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3, dtype=torch.int64),
        torch.ones(0),
        torch.ones(3, device="meta"),
        torch.ones(3).to_sparse(),
        torch.ones(3).to(torch.float8_e4m3fn),
    ],
    ids=["integers", "nothing", "meta", "sparse", "bytes"],
)
def test_what_is_not_measured(tensor):
    """It has no norm, or one that says nothing."""
    for tap, _, place in run():
        place[0] = "norm", F
        freed = two(1.0)
        freed.untyped_storage().resize_(0)
        made("def f(*x):\n    return [x[1]]", "core/n.py")["f"](tensor, two(1.0), freed)
        tap.stop()
        assert all(call.module != "norm" for call in tap.norms())
