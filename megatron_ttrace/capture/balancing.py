# SPDX-License-Identifier: Apache-2.0
"""Put the reference's choice of experts where Megatron's interface for replaying is not asked.

``TopKRouter.routing`` (megatron/core/transformer/moe/router.py) chooses experts with functions that
its module imports. Only ``topk_routing_with_score_function`` asks the replaying interface
(:class:`megatron_ttrace.capture.experts.RouterTap`), and not in its fused form. So while a router
routes, its module's functions are wrapped:

- ``sinkhorn``: what it returns is changed so that Megatron's own top-k finds the reference's
  choice; the probabilities are Megatron's.
- ``topk_routing_with_score_function``, fused: the kernel's result is kept if its choice is the
  reference's. Where it is not (ties), the result is that of the same function unfused, which can
  be told what to choose. With experts that were chosen before (quantile balancing), those are
  exchanged.
- ``apply_router_token_dropping``: it is called once more with the reference's map of what is left,
  and a capacity that drops nothing.

What a fork adds chooses by ``torch.topk``, or one expert by ``max`` or ``argmax``, in Megatron's
router or in one of its own: there, the first choice among all experts is the reference's.
"""

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron_ttrace.capture.experts import Followed, Replay
from megatron_ttrace.mcore.replaced import wrapped

_Function = Callable[..., Any]
_TOP_K = (torch.topk, torch.Tensor.topk)
_BEST = (torch.max, torch.Tensor.max, torch.argmax, torch.Tensor.argmax)


class TopK(TorchFunctionMode):
    """Within this context, the first choice among all experts is what the sink wants instead.

    Attributes:
        is_settled: whether the sink was asked, or will be by something else than ``replay``.
    """

    def __init__(
        self, followed: Followed, experts: int, chosen: int, replay: Replay | None = None
    ) -> None:
        """``chosen``: experts of a token."""
        super().__init__()
        self.is_settled = False
        self._replay = replay or Replay(followed)
        self._replay.is_asked = False
        self._followed = followed
        self._experts = experts
        self._number = chosen

    def __torch_function__(
        self, function: _Function, kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Called in the place of every function of torch."""
        result = function(*args, **(kwargs or {}))
        if self.is_settled or self._replay.is_asked or function not in _TOP_K + _BEST:
            return result
        instead = self._best if function in _BEST else self._instead
        return self._followed.override(
            result, functools.partial(instead, result, *args, **(kwargs or {}))
        )

    def _best(
        self, result: Any, input: torch.Tensor, dim: Any = None, keepdim: bool = False, **out: Any
    ) -> Any:
        """The same of ``max`` along a dimension, or of ``argmax``."""
        pair = result if isinstance(result, torch.return_types.max) else None
        found = result if pair is None else pair.indices
        if found.is_floating_point() or not isinstance(dim, int):
            return None
        indices = found if keepdim else found.unsqueeze(dim)
        instead = self._instead(torch.return_types.topk((indices, indices)), input, 1, dim, **out)
        if instead is None:
            return None
        values, indices = instead if keepdim else (part.squeeze(dim) for part in instead)
        return indices if pair is None else torch.return_types.max((values, indices))

    def _instead(
        self,
        result: Any,
        input: torch.Tensor,
        k: int,
        dim: int = -1,
        largest: bool = True,
        *_: Any,
        **out: Any,
    ) -> Any:
        """The reference's choice, and after it the best of the rest; arguments as of top-k."""
        is_over_experts = input.ndim == 2 and input.shape[1] == self._experts and dim in (1, -1)
        if not (is_over_experts and self._number <= k < self._experts and largest):
            return None
        self.is_settled = True
        chosen = self._followed.routed(input, result.indices[:, : self._number])
        if chosen is None or out.get("out"):
            return None
        rest = input.detach().scatter(1, chosen, -torch.inf).topk(k - self._number, dim=1).indices
        indices = torch.cat((chosen, rest), dim=1)
        return torch.return_types.topk((input.gather(1, indices), indices))


class OwnRouterTap:
    """Around a router that is not Megatron's."""

    def __init__(self, layer: Any, followed: Followed) -> None:
        """Attach to the router of a layer with one of Megatron's dispatchers."""
        config = layer.token_dispatcher.config
        self._wants = followed, config.num_moe_experts, config.moe_router_topk
        self._taps = contextlib.ExitStack()
        self._taps.enter_context(wrapped([(layer.router, "forward", self._forward)]))

    def remove(self) -> None:
        """Detach: the router's own method is what it was before."""
        self._taps.close()

    def _forward(self, forward: _Function, *args: Any, **kwargs: Any) -> Any:
        with TopK(*self._wants):
            return forward(*args, **kwargs)


class BalancingTap:
    """Around the routing of one router."""

    _top_k: TopK  # of the call

    def __init__(self, router: Any, followed: Followed) -> None:
        """Attach to Megatron's ``TopKRouter``."""
        self._router = router
        self._followed = followed
        self._module = sys.modules[type(router).routing.__module__]
        self._taps = contextlib.ExitStack()
        self._taps.enter_context(wrapped([(router, "routing", self._routing)]))

    def remove(self) -> None:
        """Detach: the router's own method is what it was before."""
        self._taps.close()

    def _routing(self, route: _Function, *args: Any, **kwargs: Any) -> Any:
        wraps: dict[str, _Function] = {
            "sinkhorn": self._sinkhorn,
            "qb_dual_update": self._dual_update,
            "topk_routing_with_score_function": self._topk,
            "apply_router_token_dropping": self._drop,
        }
        router = self._router
        replay = getattr(router, "router_replay", None)
        self._top_k = TopK(self._followed, router.num_experts, router.topk, replay)
        with wrapped((self._module, name, wrap) for name, wrap in wraps.items()), self._top_k:
            return route(*args, **kwargs)

    def _dual_update(self, original: _Function, *args: Any, **kwargs: Any) -> Any:
        """Of the tokens of other ranks as well."""
        self._top_k.is_settled = True
        chosen = original(*args, **kwargs)
        self._top_k.is_settled = False
        return chosen

    def _sinkhorn(self, original: _Function, cost: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self._top_k.is_settled = True
        balanced = original(cost, *args, **kwargs)
        return self._followed.override(balanced, self._rebalanced, cost, balanced)

    def _rebalanced(self, cost: torch.Tensor, balanced: torch.Tensor) -> torch.Tensor | None:
        chosen = balanced.topk(self._router.topk, dim=1).indices
        # On the scale of the scores: its logarithm is the score plus one number per expert and one
        # per token, and the latter decides nothing.
        by = balanced.clamp(min=torch.finfo(balanced.dtype).tiny).log()
        instead = self._followed.routed(cost, chosen, by=by - by.mean(dim=1, keepdim=True))
        return None if instead is None else torch.zeros_like(balanced).scatter(1, instead, 1.0)

    def _topk(
        self, original: _Function, logits: torch.Tensor, topk: int, *args: Any, **kwargs: Any
    ) -> Any:
        followed, before = self._followed, kwargs.get("precomputed_indices")
        was_settled = self._top_k.is_settled
        self._top_k.is_settled |= bool(kwargs.get("fused"))
        if before is not None and not was_settled:
            scores = logits - self._router.qb_beta
            kwargs["precomputed_indices"] = followed.override(
                before, followed.routed, scores, before
            )
        routed = original(logits, topk, *args, **kwargs)
        if not kwargs.get("fused"):
            return routed
        unfused = functools.partial(original, logits, topk, *args, **{**kwargs, "fused": False})
        return followed.override(routed, self._unfused, unfused, topk, routed[1])

    def _unfused(self, function: _Function, topk: int, routing_map: torch.Tensor) -> Any:
        """What another choice than the fused function's leads to; ``None`` for the same."""
        replay = Replay(self._followed, routing_map.nonzero()[:, 1].view(-1, topk))
        routed = function(router_replay=replay)
        return routed if replay.differs else None

    def _drop(
        self,
        original: _Function,
        probabilities: torch.Tensor,
        routing_map: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        dropped = original(probabilities, routing_map, *args, **kwargs)
        # Room for all tokens in every expert.
        room = {"capacity_factor": float(2 * routing_map.shape[1]), "pad_to_capacity": False}
        dropping = functools.partial(original, probabilities, *args, **{**kwargs, **room})
        return self._followed.override(dropped, self._dropped, dropping, probabilities, dropped[1])

    def _dropped(self, dropping: _Function, probabilities: torch.Tensor, kept: torch.Tensor) -> Any:
        """What another map of what is left leads to; ``None`` for the same."""
        followed, given = self._followed, probabilities.detach()
        instead = followed.sink.kept(followed.microbatch(), followed.name, given, kept)
        if instead is None or torch.equal(instead, kept):
            return None
        return dropping(routing_map=instead)
