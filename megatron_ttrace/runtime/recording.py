# SPDX-License-Identifier: Apache-2.0
"""The ledger of collectives in a running job: recorded on each rank, judged on one.

It adds to the report. Whatever goes wrong with it is a notice, and the check goes on.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from megatron_ttrace.capture.collectives import CollectiveTap
from megatron_ttrace.capture.step import TracedModel
from megatron_ttrace.compare import collectives
from megatron_ttrace.errors import one_line
from megatron_ttrace.mcore import logged
from megatron_ttrace.mcore.arguments import MegatronArguments
from megatron_ttrace.mcore.groups import axes_of, unseen_axes
from megatron_ttrace.mcore.precision import reduced_in
from megatron_ttrace.mcore.sources import sources_of
from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.trace import codec, folded
from megatron_ttrace.trace.codec import Count
from megatron_ttrace.trace.collectives import (
    UNRECORDED,
    Group,
    Ledger,
    Own,
    Ran,
    RankLedger,
    Sources,
)

_RAN = codec.decoder(tuple[Ran, ...])
_GROUP, _SOURCES = codec.decoder(Group), codec.decoder(Sources)
_COUNTS = codec.decoder(tuple[Count, ...])


class Recording:
    """Records the collectives of one rank's traced steps."""

    def __init__(self, model: TracedModel) -> None:
        self._model = model
        self._tap = CollectiveTap(model.names, model.mesh)
        self._forward_step: Any = None

    def step(self, iteration: int, run: Callable[[], Any]) -> Any:
        """Run Megatron's training step; returns what it returned."""
        if isinstance(run, functools.partial):
            first = run.args[0] if run.args else None
            self._forward_step = run.keywords.get("forward_step_func", first)
        with self._tap.active(iteration):
            return run()

    def message(self) -> Any:
        """What was recorded, as JSON for the rank that judges. Never raises."""
        try:
            from megatron.core.utils import get_model_config

            config = get_model_config(self._model.chunks[0])
            sources = sources_of(
                self._model.names,
                self._tap.functions,
                optimizer=self._model.optimizer,
                finalize=config.finalize_model_grads_func,
                step=self._forward_step,
            )
            sources = dataclasses.replace(sources, metrics=dict(logged.PLACES))
            return said(dataclasses.replace(self._tap.ledger(), sources=sources))
        except Exception as error:  # noqa: BLE001 - it is an addition to the report
            return said(RankLedger(error=one_line(error)))


def merged(
    meshes: Sequence[Mesh],
    messages: Sequence[Any],
    args: MegatronArguments,
    once: folded.Once,
) -> tuple[Ledger, list[str]]:
    """The ledger of all ranks, and notices of what is missing in it. Never raises.

    Args:
        meshes: of all ranks.
        messages: :meth:`Recording.message` of each rank.
        args: of the candidate.
        once: reads what several ranks said.
    """
    try:
        ranks = [decoded(said, once) for said in messages]
        compute, gradients = reduced_in(args)
        ledger = collectives.merge(
            ranks, lambda members: axes_of(members, meshes), compute=compute, gradients=gradients
        )
    except Exception as error:  # noqa: BLE001 - it is an addition to the report
        return UNRECORDED, [f"the collectives were not recorded ({one_line(error)})"]
    lost = [f"rank {rank}: {one.error}" for rank, one in enumerate(ranks) if one.error][:1]
    ledger = dataclasses.replace(ledger, unseen=unseen_axes(args))
    return ledger, [f"not all collectives were recorded ({one})" for one in lost]


def said(ledger: RankLedger) -> dict[str, Any]:
    """A message of one rank, in which little is only its own."""
    return {**ledger.to_json(), "own": [number for one in ledger.own for number in one]}


def decoded(message: dict[str, Any], once: folded.Once) -> RankLedger:
    """The inverse of :func:`said`. Raises ``CodecError``."""
    own = itertools.batched(once(_COUNTS, message["own"]), 3)
    ledger = RankLedger(
        once(_RAN, message["ran"]),
        tuple(once(_GROUP, one) for one in message["groups"]),
        tuple(itertools.starmap(Own, own)),
        once(_SOURCES, message["sources"]),
        str(message["error"]),
    )
    if why := ledger.contradiction():
        raise codec.CodecError(why)
    return ledger
