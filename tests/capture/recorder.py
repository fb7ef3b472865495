# SPDX-License-Identifier: Apache-2.0
"""A sink that remembers, and small models to tap."""

from collections.abc import Sequence

import torch

from megatron_ttrace.capture.experts import Followed
from megatron_ttrace.capture.modules import ModuleTap
from megatron_ttrace.mcore.names import canonical_names
from megatron_ttrace.placement.token_index import TokenIndex
from megatron_ttrace.trace.captured import Place, Routed
from megatron_ttrace.trace.findings import Remark


class Recorder:
    """Keeps a copy of everything it is handed."""

    def __init__(self) -> None:
        self.events: list[tuple[Place, ...]] = []
        self.values: dict[Place, torch.Tensor] = {}
        self.repeats: dict[Place, Place] = {}
        self.placements: dict[Place, tuple[tuple[int, ...], str]] = {}
        self.instead: dict[Place, torch.Tensor] = {}
        self.later: dict[Place, torch.Tensor] = {}
        self.fail_on: str | None = None

    def tensor(self, places: Sequence[Place], data: torch.Tensor) -> None:
        self.events.append(tuple(places))
        if self.fail_on in ("tensor", *(place[1] for place in places)):
            raise RuntimeError("the sink broke")
        for place in places:
            assert place not in self.values, f"{place} twice"
            self.values[place] = data.detach().clone()

    def repeat(self, first: Place, place: Place, data: torch.Tensor) -> None:
        assert first in self.values
        assert place not in self.values, f"{place} twice"
        assert self.instead or torch.equal(self.values[first], data)
        self.repeats[place] = first
        self.values[place] = data.detach().clone()

    def again(self, place: Place, data: torch.Tensor, why: Remark, known: object = None) -> None:
        self.later[place] = data.detach().clone()

    def replace(self, place: Place, data: torch.Tensor) -> torch.Tensor | None:
        found = self.instead.get(place)
        return None if found is None else found.clone()

    def placed(self, place, data, logical_shape, placement) -> None:
        self.tensor((place,), data)
        self.placements[place] = tuple(logical_shape), " ".join(map(str, placement))

    def names(self, kind) -> list[str]:
        """Names of one kind in the order in which they came."""
        return [place[2] for place in self.values if place[1] is kind]


class Block(torch.nn.Module):
    """A residual block of two linear layers, the second one in place."""

    def __init__(self, size: int, number: int) -> None:
        super().__init__()
        self.layer_number = number
        self.first = torch.nn.Linear(size, size)
        self.act = torch.nn.GELU()
        self.second = torch.nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added = self.second(self.act(self.first(x)))
        # As Megatron adds biases, also where a block that is recomputed runs without gradients.
        with torch.enable_grad():
            return x + added


class Model(torch.nn.Module):
    """Embedding, blocks, head, loss; ``recompute`` checkpoints the blocks."""

    def __init__(self, layers: int = 2, size: int = 6, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(11, size)
        self.layers = torch.nn.ModuleList(Block(size, n + 1) for n in range(layers))
        self.output_layer = torch.nn.Linear(size, 11, bias=False)
        self.recompute = recompute

    def forward(self, ids: torch.Tensor, *, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            if self.recompute:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True)
            else:
                x = layer(x)
        logits = self.output_layer(x)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 11, (2, 6), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def tapped(chunks, sink, microbatches=(0,), errors=None):
    """A tap on models; errors of tracing are collected, or fail the test."""

    def on_error(error: BaseException) -> None:
        if errors is None:
            raise AssertionError("tracing failed") from error
        errors.append(error)

    return ModuleTap([canonical_names(chunk) for chunk in chunks], sink, microbatches, on_error)


class ExpertRecorder:
    """Remembers what becomes of tokens; asks for another choice, or for none."""

    def __init__(self, instead: torch.Tensor | None = None, kept: torch.Tensor | None = None):
        self.dispatches: list[tuple[int, str, TokenIndex]] = []
        self.routes: list[tuple[int, str, Routed]] = []
        self.drops: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._instead, self._kept = instead, kept

    def positions(self, microbatch: int, local: tuple[int, int]) -> torch.Tensor:
        return torch.arange(local[0] * local[1]) + 100

    def dispatched(self, microbatch: int, experts: str, index: TokenIndex) -> None:
        self.dispatches.append((microbatch, experts, index))

    def routed(self, microbatch: int, router: str, routed: Routed) -> torch.Tensor | None:
        self.routes.append((microbatch, router, routed))
        return self._instead

    def kept(
        self, microbatch: int, router: str, probabilities: torch.Tensor, kept: torch.Tensor
    ) -> torch.Tensor | None:
        self.drops.append((probabilities, kept))
        return self._kept

    def follow(self, name: str, *, broken: bool = False) -> Followed:
        """In microbatch 3; no error is hidden, unless tracing is ``broken``."""
        return Followed(name, lambda: 3, self, lambda f, *a: None if broken else f(*a))
