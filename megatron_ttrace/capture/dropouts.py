# SPDX-License-Identifier: Apache-2.0
"""What dropout would draw its masks from; it is switched off in traced steps (mcore/quiet.py).

Ranks with the same activations must drop the same elements, tensor-parallel ranks with different
parts different ones, so Megatron keeps two random states: one that they share, and a named one that
is each rank's own (megatron/core/tensor_parallel/random.py). What ranks draw from these, and would
draw after the step, shows whether they are the same. A recomputation must drop what the forward
pass dropped, and leave the states as they were: each call of a forward pass draws a mask of its
own. Not followed are masks that TransformerEngine draws in its kernels, and those of adapters
within experts: which tokens a rank's experts get depends on the layout.
"""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn.modules import module as hooks

from megatron_ttrace.capture.chunk_state import is_recomputing
from megatron_ttrace.capture.schedule_plan import runs_in_pieces
from megatron_ttrace.mcore import quiet
from megatron_ttrace.mcore.names import Names, called_in
from megatron_ttrace.mcore.replaced import replaced
from megatron_ttrace.mcore.roles import is_within_experts
from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.trace.captured import Place
from megatron_ttrace.trace.records import ROOT, STEP_LEVEL, DropoutIndex, Kind


def runs_whole(chunks: Sequence[Names]) -> bool:
    """Whether modules say that they run, as they do not in pieces (capture/schedule_plan.py)."""
    return not any(runs_in_pieces(names.modules[ROOT]) for names in chunks)


@dataclasses.dataclass(slots=True)
class _Call:
    """A call of dropout in a forward pass.

    Attributes:
        place: of what is recorded of it, with the first of its indices (:class:`DropoutIndex`).
        elements: of which a mask would be drawn, by one tensor-parallel rank.
        number: drawn in place of the mask.
        probability: of an element to be dropped.
        waits: to be recomputed, if it is.
        is_right: whether its recomputation, if any, draws the same.
    """

    place: Place
    elements: int
    number: float
    probability: float = 0.0
    waits: bool = True
    is_right: bool = True


class DropoutTap:
    """Follows the calls of PyTorch's dropout, whatever its name, in the modules of a rank."""

    def __init__(
        self,
        chunks: Sequence[Names],
        mesh: Mesh,
        microbatch: Callable[[int], int | None],
        record: Callable[[Place, float], None],
        gather: Callable[[list[float]], list[list[float]]],
        *,
        on_cpu: bool = True,
    ) -> None:
        """Prepare for the chunks of the rank at a place of the mesh.

        ``microbatch`` returns the reference's number of that which a chunk works on, if any;
        ``record`` is given what is found out about a call (:class:`DropoutIndex`); ``gather``
        returns what all tensor-parallel ranks give it. A GPU's kernels draw masks that are not
        judged: only ``on_cpu`` is dropout followed, and ranks communicate.
        """
        self._chunks = chunks
        self._known = {
            id(module): (chunk, name)
            for chunk, names in enumerate(chunks)
            for name, module in names.modules.items()
        }
        self._tp, self._cp = mesh.size("tp"), mesh.size("cp")
        self._microbatch, self._record, self._gather = microbatch, record, gather
        self._running: list[tuple[int, str]] = []
        self._in_order: list[_Call] = []
        self._follows = on_cpu and runs_whole(chunks)
        self._device: torch.device | None = None
        self._drawn: list[list[float]] = []
        self._calls: defaultdict[tuple[int, int, str], list[_Call]] = defaultdict(list)

    @property
    def draws(self) -> bool:
        """Whether numbers were drawn in place of masks."""
        return bool(self._in_order)

    @contextmanager
    def active(self, attempt: Callable[..., Any]) -> Iterator[None]:
        """Follow what runs in this context; ``attempt`` runs what must not raise."""

        def drops(data: torch.Tensor, p: float, train: bool = True) -> None:
            probability = p.was if isinstance(p, quiet.Off) else float(p)
            if train and probability and self._running:
                attempt(self._draws, data, probability)

        def followed(
            kernel: Callable[..., torch.Tensor], input: torch.Tensor, p: float, train: bool
        ) -> torch.Tensor:
            drops(input, p, train)
            return kernel(input, p, train)

        def attends(attention: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            given = quiet.given_to_attention(*args, **kwargs).arguments
            drops(given["query"], given.get("dropout_p", 0.0))
            return attention(*args, **kwargs)

        kernels = [(o, n, functools.partial(followed, getattr(o, n))) for o, n in quiet.KERNELS]
        owner, name = torch.nn.functional, "scaled_dot_product_attention"
        kernels.append((owner, name, functools.partial(attends, getattr(owner, name))))

        with ExitStack() as kept:
            if self._follows:
                before = hooks.register_module_forward_pre_hook(self._enters)
                kept.callback(before.remove)
                after = hooks.register_module_forward_hook(self._leaves, always_call=True)
                kept.callback(after.remove)
                kept.enter_context(replaced(kernels))
            yield
            attempt(self._ends)

    def compare(self) -> None:
        """The step is over: learn what other ranks drew. A collective of tensor-parallel ranks."""
        own = [call.number for call in self._in_order]
        self._drawn = self._gather(own) if self._follows and self._tp > 1 else [own]

    def conclude(self) -> None:
        """Record how many elements got masks of their own, and which masks are right."""
        drawn: set[float] = set()
        for at, call in enumerate(self._in_order):
            microbatch, kind, name, first = call.place
            masks = len({numbers[at] for numbers in self._drawn if at < len(numbers)})
            found: dict[DropoutIndex, float] = {
                DropoutIndex.PROBABILITY: call.probability,
                DropoutIndex.ELEMENTS: call.elements * masks,
                DropoutIndex.RECOMPUTED: 2 if call.number in drawn else int(call.is_right),
            }
            drawn.add(call.number)
            for index, number in found.items():
                self._record((microbatch, kind, name, first + index), number)

    def _enters(self, module: torch.nn.Module, args: Any) -> None:
        if (where := self._known.get(id(module))) is not None:
            self._running.append(where)

    def _leaves(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self._running and self._running[-1] == self._known.get(id(module)):
            self._running.pop()

    def _ends(self) -> None:
        """What the next step draws first, if this one drew anything."""
        if self._in_order:
            place = STEP_LEVEL, Kind.DROPOUT, ROOT, DropoutIndex.ELEMENTS
            self._in_order.append(_Call(place, 1, self._number()))

    def _number(self) -> float:
        """In float64: no two are equal by chance."""
        return float(torch.rand((), dtype=torch.float64, device=self._device))

    def _draws(self, data: torch.Tensor, probability: float) -> None:
        chunk, name = self._running[-1]
        if is_within_experts(name):
            return
        layers = self._chunks[chunk].layers
        name = called_in(next((m for _, m in reversed(self._running) if m in layers), ROOT), name)
        if (microbatch := self._microbatch(chunk)) is None:
            return
        calls = self._calls[chunk, microbatch, name]
        self._device = data.device
        number = self._number()
        if not is_recomputing():
            place = microbatch, Kind.DROPOUT, name, len(calls) * len(DropoutIndex)
            calls.append(_Call(place, data.numel() * self._cp, number, probability))
            self._in_order.append(calls[-1])
            return
        waiting = [call for call in calls if call.waits]
        same = [call for call in waiting if call.number == number]
        for call in (same or waiting)[:1]:
            call.waits, call.is_right = False, bool(same)
