# SPDX-License-Identifier: Apache-2.0
"""From which random state dropout would draw, and whether a recomputation draws the same."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch.nn.functional import dropout as imported
from torch.utils.checkpoint import checkpoint

from megatron_ttrace.capture import dropouts
from megatron_ttrace.capture.dropouts import DropoutTap
from megatron_ttrace.mcore import quiet
from megatron_ttrace.mcore.names import Names
from megatron_ttrace.trace.captured import Place
from megatron_ttrace.trace.records import ROOT, STEP_LEVEL, DropoutIndex, Kind
from tests.placement.meshes import mesh_of

SIZE = 6
NO_STATE = contextlib.nullcontext


class Layer(torch.nn.Module):
    """Drops twice: in a module of its own, and in itself."""

    def __init__(self, state: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        super().__init__()
        self.hidden_dropout = 0.25
        self.inner = torch.nn.Dropout(0.5)
        self.state = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Only the second call draws from ``state``."""
        x = self.inner(x)
        with self.state():
            return F.dropout(x, self.hidden_dropout, self.training)


@contextlib.contextmanager
def fork(seed: int) -> Iterator[None]:
    """Draw from a state of the rank's own, as Megatron's tracker lets it."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def followed(
    layer: Layer,
    run: Callable[[torch.Tensor], torch.Tensor],
    *,
    off: float = quiet.Off(),
    layers: frozenset[str] = frozenset(),
    inner: str = "layer.inner",
    gather: Callable[[list[float]], list[list[float]]] = lambda own: [own],
    afterwards: bool = False,
    **sizes: int,
) -> dict[Place, float]:
    """What is recorded of ``run`` and its backward pass, on the first rank of a mesh."""
    modules = {"model": torch.nn.Sequential(layer), "layer": layer, inner: layer.inner}
    names = Names(modules, {}, {}, frozenset(), layers)
    found: dict[Place, float] = {}
    mesh = mesh_of(0, math.prod(sizes.values()), **sizes)
    on_cpu = isinstance(off, quiet.Off)
    tap = DropoutTap([names], mesh, lambda chunk: 3, found.__setitem__, gather, on_cpu=on_cpu)
    x = torch.ones(2, SIZE // 2, requires_grad=True)
    with quiet.without_dropout([modules["model"]], off), tap.active(lambda f, *args: f(*args)):
        y = run(x)
        assert torch.equal(y, x)
        y.sum().backward()
    tap.compare()
    tap.conclude()
    assert F.dropout is dropouts.torch.nn.functional.dropout
    return found if afterwards else {place: n for place, n in found.items() if place[0] == 3}


def at(name: str, index: int = DropoutIndex.ELEMENTS) -> Place:
    return 3, Kind.DROPOUT, name, index


@pytest.mark.parametrize(
    ("common", "own", "masks"),
    [
        pytest.param((1, 1), (2, 3), (1, 2), id="right"),
        pytest.param((1, 4), (2, 3), (2, 2), id="common-state-of-its-own"),
        pytest.param((1, 1), (2, 2), (1, 1), id="own-state-in-common"),
    ],
)
def test_masks_of_its_own(
    common: tuple[int, int], own: tuple[int, int], masks: tuple[int, int]
) -> None:
    """Ranks of tp draw the same from a state that they share; cp divides all activations."""
    drawn: list[list[float]] = []

    def gather(numbers: list[float]) -> list[list[float]]:
        drawn.append(numbers)
        return drawn

    for rank in (1, 0):
        torch.manual_seed(common[rank])
        layer = Layer(functools.partial(fork, own[rank]))
        found = followed(layer, layer, gather=gather, tp=2, cp=4)
    assert found == {
        at("layer.inner"): 4 * SIZE * masks[0],
        at("layer"): 4 * SIZE * masks[1],
        at("layer.inner", DropoutIndex.RECOMPUTED): 1,
        at("layer", DropoutIndex.RECOMPUTED): 1,
        at("layer.inner", DropoutIndex.PROBABILITY): 0.5,
        at("layer", DropoutIndex.PROBABILITY): 0.25,
    }


def test_a_rank_that_drops_less_often() -> None:
    layer = Layer(NO_STATE)
    found = followed(layer, layer, gather=lambda own: [own, own[:1]], tp=2)
    assert (found[at("layer.inner")], found[at("layer")]) == (SIZE, SIZE)


@pytest.mark.parametrize("last", [[], [0.5]])
def test_what_the_next_step_draws(last: list[float]) -> None:
    """A rank has drawn once more than the other one, after the last mask."""
    layer = Layer(NO_STATE)

    def gather(own: list[float]) -> list[list[float]]:
        return [own, own[: -len(last) or None] + last]

    found = followed(layer, layer, gather=gather, afterwards=True, tp=2)
    assert found[STEP_LEVEL, Kind.DROPOUT, ROOT, DropoutIndex.ELEMENTS] == 1 + len(last)
    assert found[at("layer")] == SIZE


@pytest.mark.parametrize("restores", [True, False])
def test_a_recomputation_is_the_last_to_draw(restores: bool) -> None:
    """It leaves a state of which the forward pass has drawn."""
    layer, state = Layer(NO_STATE), torch.get_rng_state()

    def run(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(layer, x, use_reentrant=True)
        if not restores:
            y.register_hook(lambda _: torch.set_rng_state(state))
        return y

    found = followed(layer, run, afterwards=True)
    again = found[STEP_LEVEL, Kind.DROPOUT, ROOT, DropoutIndex.RECOMPUTED]
    assert again == (1 if restores else 2)


@pytest.mark.parametrize(("inner", "name"), [("layer.inner",) * 2, ("shared", "shared#layer")])
def test_each_call_has_a_number(inner: str, name: str) -> None:
    """What is outside of the layer that calls it is named for that layer."""
    layer = Layer(NO_STATE)
    found = followed(layer, lambda x: layer(layer(x)), layers=frozenset({"layer"}), inner=inner)
    calls = [(name, index) for _, _, name, index in found if index % 3 == DropoutIndex.ELEMENTS]
    assert calls == [(name, 0), ("layer", 0), (name, 3), ("layer", 3)]


@pytest.mark.parametrize("restored", [True, False])
def test_a_recomputation_draws_the_same(restored: bool) -> None:
    """Of two runs the last is recomputed first."""
    layer = Layer(NO_STATE)

    def run(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(layer, x, use_reentrant=True, preserve_rng_state=restored)
        return x

    found = followed(layer, run)
    right = {(name, i): n for (_, _, name, i), n in found.items() if i % 3 == 1}
    assert right == {(name, i): restored for name in ("layer", "layer.inner") for i in (1, 4)}


@pytest.mark.parametrize("puts_back", [True, False])
def test_a_recomputation_leaves_the_random_states(puts_back: bool) -> None:
    """Else what runs after it draws the masks of what ran before."""
    layer = Layer(NO_STATE)

    def run(x: torch.Tensor) -> torch.Tensor:
        before = torch.get_rng_state()
        x = layer(x)
        if not puts_back:
            torch.set_rng_state(before)
        x = layer(x)
        return x

    found = followed(layer, run)
    right = {(name, i): n for (_, _, name, i), n in found.items() if i % 3 == 1}
    again = 1 if puts_back else 2
    names = "layer", "layer.inner"
    assert right == {(name, i): n for name in names for i, n in ((1, 1), (4, again))}


def test_what_is_not_followed() -> None:
    """Where kernels drop; what never drops; evaluation."""
    layer = Layer(NO_STATE)
    assert not followed(layer, layer, off=0.0)
    layer.eval()
    assert not followed(layer, layer)
    without = Layer(NO_STATE)
    without.hidden_dropout = without.inner.p = 0.0
    assert not followed(without, without)


@pytest.mark.parametrize(
    "drop",
    [
        lambda x: F.dropout(x, 0.125),
        lambda x: F.dropout(x, 0.125, inplace=True),
        lambda x: imported(x, 0.125),
        lambda x: torch.dropout(x, p=0.125, train=True),
        lambda x: F.dropout1d(x, 0.125),
        lambda x: F.alpha_dropout(x, 0.125, True),
        lambda x: x + 0 * F.scaled_dot_product_attention(x, x, x, dropout_p=0.125),
    ],
)
def test_a_probability_that_no_module_has(drop: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A fork's function computes it, maybe from the number of ranks, and calls any function."""
    layer = Layer(NO_STATE)
    layer.hidden_dropout = layer.inner.p = 0.0
    layer.inner.forward = lambda x: drop(1 * x)  # type: ignore[method-assign]
    found = followed(layer, layer)
    assert found[at("layer.inner", DropoutIndex.PROBABILITY)] == 0.125
    assert len(found) == len(DropoutIndex)


def test_experts_have_other_tokens_in_each_layout() -> None:
    """So masks of an adapter of theirs are not followed."""
    layer = Layer(NO_STATE)
    found = followed(layer, layer, inner="layer.mlp.experts.linear_fc1.adapter.dropout")
    assert {name for _, _, name, _ in found} == {"layer"}
