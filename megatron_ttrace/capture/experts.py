# SPDX-License-Identifier: Apache-2.0
"""Follow tokens to their experts, and route them in every run as in the reference.

*Dispatch*: the token dispatcher's three steps (``dispatch_preprocess``, ``token_dispatch``,
``dispatch_postprocess`` in megatron/core/transformer/moe/token_dispatcher.py) are run once more on
a shallow copy, with each token's microbatch and position in place of its hidden state. The result
says which token each row of the experts' input is, whatever the order of arrival; a dispatcher that
sends a token to the wrong place sends its number there as well. A dispatcher may fill an expert's
rows with tokens that did not choose it (``moe_router_padding_for_quantization``), which depends on
the layout: these rows count as padding.

*Routing*: the choice of experts is discrete, and two scores within rounding may be ordered
differently in another layout (or in bf16, where ties are frequent). The choice of each router is
compared (:mod:`megatron_ttrace.compare.routing`), then replaced by the reference's through
Megatron's interface for replaying (``RouterReplay.get_replay_topk``). So is the choice of keys in
sparse attention, which is a choice by scores as well (``fused_qk_topk_naive`` in
megatron/core/transformer/experimental_attention_variant/dsa.py).
"""

import contextlib
import copy
import dataclasses
import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import torch

from megatron_ttrace.mcore.replaced import wrapped
from megatron_ttrace.placement.token_index import TokenIndex
from megatron_ttrace.trace.captured import Groups, Routed
from megatron_ttrace.trace.staging import to_device

_FOLLOWED = ("MoEAlltoAllTokenDispatcher", "MoEAllGatherTokenDispatcher")
"""Dispatchers whose steps carry any tensor of tokens; DeepEP's kernels want hidden states."""

_Step = Callable[..., Any]

_NEVER = 1 << 24
"""A position that no token has: float32 is exact for smaller ones only."""


class ExpertSink(Protocol):
    """Where dispatches and choices go."""

    def positions(self, microbatch: int, local: tuple[int, int]) -> torch.Tensor:
        """Position of each token of this rank's [sequence, micro batch] in its microbatch."""

    def dispatched(self, microbatch: int, experts: str, index: TokenIndex) -> None:
        """The experts of a layer are about to receive these rows."""

    def routed(self, microbatch: int, router: str, routed: Routed) -> torch.Tensor | None:
        """What a router chose; returns what it must choose instead, if anything.

        Called again with the same where activations are recomputed.
        """

    def kept(
        self, microbatch: int, router: str, probabilities: torch.Tensor, kept: torch.Tensor
    ) -> torch.Tensor | None:
        """What is left of a choice ([tokens, experts]) within the experts' capacity.

        Returns what must be left instead, if anything.
        """


@dataclasses.dataclass(frozen=True)
class Followed:
    """A router, or the experts of a layer, that tokens are followed through.

    Attributes:
        name: its canonical name.
        microbatch: global number of the microbatch that is being worked on.
        sink: receives what becomes of the tokens.
        guard: calls a function, so that its errors do not reach training.
        run: which of the router's runs in the microbatch this is, as of :class:`Routed`.
    """

    name: str
    microbatch: Callable[[], int]
    sink: ExpertSink
    guard: Callable[..., Any]
    run: Callable[[], int | None] = lambda: 0

    def override(self, default: Any, function: Callable[..., Any], *args: Any) -> Any:
        """What a function of ours wants instead; ``default`` if it wants nothing, or fails."""
        instead = self.guard(function, *args)
        return default if instead is None else instead

    def routed(
        self,
        scores: torch.Tensor,
        chosen: torch.Tensor,
        groups: Groups | None = None,
        by: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """What the sink wants a router to choose; ``None`` where it wants nothing else."""
        routed = Routed(scores.detach(), chosen.detach(), groups, by, self.run())
        return self.sink.routed(self.microbatch(), self.name, routed)


def can_follow(layer: Any) -> bool:
    """Whether a module has a dispatcher that can send other data than hidden states."""
    kinds = type(getattr(layer, "token_dispatcher", None)).__mro__
    return any(kind.__name__ in _FOLLOWED for kind in kinds)


class DispatchTap:
    """On the dispatcher of one layer of experts."""

    def __init__(self, layer: Any, experts: Followed) -> None:
        """Attach to Megatron's ``MoELayer``."""
        self._dispatcher = layer.token_dispatcher
        self._first_expert = layer.local_expert_indices[0]
        self._pads = bool(self._dispatcher.config.moe_router_padding_for_quantization)
        self._experts = experts
        self._asked: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        kind = type(self._dispatcher)
        self._steps = (kind.dispatch_preprocess, kind.token_dispatch, kind.dispatch_postprocess)
        taps = ("dispatch_preprocess", self._before), ("dispatch_postprocess", self._after)
        self._taps = contextlib.ExitStack()
        self._taps.enter_context(wrapped((self._dispatcher, *tap) for tap in taps))

    def remove(self) -> None:
        """Detach: the dispatcher's own methods are what they were before."""
        self._taps.close()

    def _before(
        self, preprocess: _Step, hidden: torch.Tensor, routing: torch.Tensor, probs: torch.Tensor
    ) -> Any:
        self._asked = hidden, routing, probs
        if self._pads:
            # A copy: padding is written into the original (pad_routing_map in moe_utils.py).
            chosen = routing.clone()
            self._asked = hidden, chosen, probs
            # The same numbers, but without gradients of tokens that are padding.
            probs = torch.where(chosen, probs, 0)
        return preprocess(hidden, routing, probs)

    def _after(self, postprocess: _Step, *args: Any, **kwargs: Any) -> Any:
        result = postprocess(*args, **kwargs)
        asked, self._asked = self._asked, None
        if asked is None:
            return result
        guard, (hidden, routing, probs) = self._experts.guard, asked
        names = guard(self._names, hidden.shape[0], hidden.shape[1])
        if names is None:
            names = torch.zeros(hidden.shape[0], hidden.shape[1], 2)
        # A collective: also on a rank whose tracing failed, where the guard calls nothing.
        try:
            chosen = routing.to(probs.dtype)
            carried, counts = self._carry(to_device(names, hidden.device), routing.clone(), chosen)
        except Exception as error:  # noqa: BLE001 - tracing never harms training
            guard(_reraise, error)
            return result
        guard(self._follow, carried, counts)
        return result

    def _names(self, sequence: int, samples: int) -> torch.Tensor:
        number = self._experts.microbatch()
        position = self._experts.sink.positions(number, (sequence, samples))
        microbatch = torch.full_like(position, number + 1)
        # Every dispatcher can send float32, which is exact for these numbers; 0 means padding.
        return torch.stack((microbatch, position), dim=-1).float().view(sequence, samples, 2)

    @torch.no_grad()
    def _carry(
        self, names: torch.Tensor, routing: torch.Tensor, chosen: torch.Tensor
    ) -> tuple[torch.Tensor, Any]:
        """Send the names, and in place of probabilities the choice, the way the tokens went."""
        shadow = copy.copy(self._dispatcher)
        shadow.shared_experts = None
        before, across, after = self._steps
        carried, chosen = before(shadow, names, routing, chosen)
        carried, chosen = across(shadow, carried, chosen)
        carried, counts, chosen = after(shadow, carried, chosen)
        return carried * (chosen.view(-1, 1) != 0) if self._pads else carried, counts

    def _follow(self, carried: torch.Tensor, counts: Any) -> None:
        rows = self._read(carried.detach().to("cpu"))
        counts = np.asarray(torch.as_tensor(counts).to("cpu", torch.int64))
        experts = np.arange(self._first_expert, self._first_expert + len(counts))
        index = TokenIndex(rows[:, 0] - 1, rows[:, 1].copy(), np.repeat(experts, counts))
        followed = self._experts
        followed.sink.dispatched(followed.microbatch(), followed.name, index)

    def _read(self, carried: torch.Tensor) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The names as numbers; what nobody sent becomes a token that nobody has.

        A dispatcher that leaves out a collective hands on memory that was never written.
        """
        sent = ((carried >= 0) & (carried < _NEVER)).all(dim=1, keepdim=True)
        nobodys = torch.tensor([self._experts.microbatch() + 1, _NEVER], dtype=carried.dtype)
        return torch.where(sent, carried, nobodys).round().to(torch.int64).numpy()


def _reraise(error: Exception) -> None:
    raise error


class Replay:
    """In the place of Megatron's ``RouterReplay``: the reference's choice, where it has one.

    ``chosen``: what the router chose, if it is known before it asks; ``own``: the job's replay, if
    it has one, which chooses.

    Attributes:
        is_asked: whether the router has asked.
    """

    def __init__(
        self, followed: Followed, chosen: torch.Tensor | None = None, own: Any = None
    ) -> None:
        self._followed = followed
        self._chosen = chosen
        self._own = own
        self._instead: torch.Tensor | None = None
        self.is_asked = False

    @property
    def differs(self) -> bool:
        """Whether any token got other experts than were known to be chosen."""
        if self._chosen is None or self._instead is None:
            return False
        chosen, instead = (each.sort(dim=1).values for each in (self._chosen, self._instead))
        return not torch.equal(chosen, instead)

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The scores and experts of each token, as Megatron's router asks for them."""
        self.is_asked = True
        if (chosen := self._chosen) is None:
            choose = default_compute_topk
            if self._own is not None:
                choose = functools.partial(self._own.get_replay_topk, default_compute_topk=choose)
            assert choose is not None
            values, chosen = choose(scores, topk, num_groups, group_topk)
        else:
            values = scores.gather(1, chosen)
        groups = Groups(num_groups, group_topk) if num_groups and group_topk else None
        self._instead = self._followed.override(None, self._followed.routed, scores, chosen, groups)
        if self._instead is None:
            return values, chosen
        return scores.gather(1, self._instead), self._instead


class RouterTap(Replay):
    """On the ``router_replay`` of one router."""

    def __init__(self, router: Any, followed: Followed) -> None:
        """Attach to Megatron's ``TopKRouter``."""
        super().__init__(followed, own=router.router_replay)
        self._router = router
        router.router_replay = self

    def remove(self) -> None:
        """Detach."""
        self._router.router_replay = self._own


def dsa_of(module: Any) -> ModuleType | None:
    """Where Megatron's sparse attention is defined, if the module is one."""
    kinds = (kind for kind in type(module).__mro__ if kind.__name__ == "DSAttention")
    return next((sys.modules[kind.__module__] for kind in kinds), None)


class SelectionTap:
    """On a sparse attention, whose indexer chooses keys for each token.

    In the place of experts are the keys of a sample. A token with fewer keys than are chosen has no
    choice: it has all of them, and -1 for the rest.
    """

    def __init__(self, attention: Any, followed: Followed) -> None:
        """Attach to Megatron's ``DSAttention``."""
        self._attention = attention
        self._followed = followed
        self._taps = contextlib.ExitStack()
        self._taps.enter_context(wrapped([(attention, "forward", self._selecting)]))

    def remove(self) -> None:
        """Detach: the module's own method is what it was before."""
        self._taps.close()

    def _selecting(self, forward: _Step, *args: Any, **kwargs: Any) -> Any:
        with wrapped([(dsa_of(self._attention), "fused_qk_topk_naive", self._select)]):
            return forward(*args, **kwargs)

    def _select(self, select: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        scores, chosen = select(*args, **kwargs)
        positions = kwargs.get("key_positions")
        return scores, self._followed.override(chosen, self._instead, scores, chosen, positions)

    def _instead(
        self, scores: torch.Tensor, chosen: torch.Tensor, positions: torch.Tensor | None
    ) -> torch.Tensor | None:
        """The reference's choice of keys, [samples, tokens, k], by [samples, tokens, keys]."""
        samples, tokens, keys = scores.shape
        in_order = positions is None or bool((positions.diff() == 1).all())
        if chosen.shape[-1] >= keys or not in_order:
            return None
        by_token = scores.transpose(0, 1).reshape(tokens * samples, keys)
        ours = chosen.transpose(0, 1).reshape(tokens * samples, -1)
        allowed = by_token.masked_fill(by_token == -torch.inf, 0.0)
        theirs = self._followed.routed(allowed, ours.clamp(min=0))
        if theirs is None:
            return None
        kept = torch.where((ours < 0).any(dim=1, keepdim=True), ours, theirs.to(ours.dtype))
        return kept.view(tokens, samples, -1).transpose(0, 1)
