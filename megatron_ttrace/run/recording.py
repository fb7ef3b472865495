# SPDX-License-Identifier: Apache-2.0
"""The ledger of collectives in a running job: recorded on each rank, judged on one.

It adds to the report. Whatever goes wrong with it is a notice, and the check goes on.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from megatron_ttrace.capture.calls import CallTap
from megatron_ttrace.capture.collectives import CollectiveTap
from megatron_ttrace.capture.executed import ExecutedTap
from megatron_ttrace.capture.step import TracedModel
from megatron_ttrace.compare import collectives
from megatron_ttrace.compare.norms import agreements, read_calls
from megatron_ttrace.mcore import logged
from megatron_ttrace.mcore.arguments import MegatronArguments
from megatron_ttrace.mcore.checkpoints.buckets import shards_of
from megatron_ttrace.mcore.groups import axes_of, described, reduced_in, unseen_axes
from megatron_ttrace.mcore.sources import attributes_of, sources_of
from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.trace import codec, folded
from megatron_ttrace.trace.collectives import (
    UNRECORDED,
    Call,
    CallNorms,
    Calls,
    Group,
    Ledger,
    Numbers,
    Phase,
    RankLedger,
    Shard,
    Size,
    Sources,
)
from megatron_ttrace.trace.errors import one_line
from megatron_ttrace.trace.executed import ChangedCode, ChangedFunction, Edits, Executed, Execution
from megatron_ttrace.trace.meta import ReferenceMeta
from megatron_ttrace.trace.store import TraceReader

_CALLS, _SIZES = codec.decoder(tuple[Call, ...]), codec.decoder(tuple[Size, ...])
_GROUP, _SOURCES = codec.decoder(Group), codec.decoder(Sources)
_NUMBERS, _SHARDS = codec.decoder(Numbers), codec.decoder(dict[str, Shard])
_APART = codec.decoder(tuple[str, ...])
_NORMS = codec.decoder(tuple[CallNorms, ...])
_EXECUTED = codec.decoder(tuple[Executed, ...])


class Recording:
    """Records the collectives of one rank's traced steps."""

    def __init__(self, model: TracedModel, executed: ExecutedTap, calls: CallTap) -> None:
        """Both taps record since before the model was built."""
        self._model = model
        self._executed, self._calls = executed, calls
        executed.in_steps(_outside)
        self._tap = CollectiveTap(model.names, model.mesh, calls.entered)
        calls.in_steps(self._tap.around)
        self._forward_step: Any = None
        # Of gradients against the reference's, on ranks whose first microbatch is its own first.
        self.factor: float | None = None

    def step(self, iteration: int, run: Callable[[], Any]) -> Any:
        """Run Megatron's training step; returns what it returned."""
        if isinstance(run, functools.partial):
            first = run.args[0] if run.args else None
            self._forward_step = run.keywords.get("forward_step_func", first)
        self._executed.in_steps(self._tap.here)
        try:
            with self._tap.active(iteration):
                return run()
        finally:
            self._executed.in_steps(_outside)

    def message(self, reference: ReferenceMeta, *, with_code: bool) -> Any:
        """What was recorded, as JSON for the rank that judges. Never raises.

        ``with_code``: with what is only needed to find the place of a fault.
        """
        self._executed.stop()
        self._calls.stop()
        ran = self._executed.executed(self._model.names)
        executed = {
            "ran": codec.encode(ran),
            "error": self._executed.error,
            "unrecorded": self._calls.error,
        }
        return {**self._ledger(reference, with_code=with_code), "executed": executed}

    def _ledger(self, reference: ReferenceMeta, *, with_code: bool) -> dict[str, Any]:
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
            mesh, names = self._model.mesh, self._model.names
            buckets, shards = shards_of(self._model.optimizer, names)
            ledger = dataclasses.replace(self._tap.ledger(), shards=shards)
            calls = Calls()
            if with_code:
                calls = self._calls.calls(names, lambda group: described(group, mesh))
                ledger = dataclasses.replace(
                    ledger,
                    numbers=self._calls.numbers() | attributes_of(names),
                    apart=self._calls.apart(reference.lines),
                    norms=() if self.factor is None else self._calls.norms(),
                    factor=self.factor or 1.0,
                )
            calls = dataclasses.replace(calls, buckets=buckets)
            sources = dataclasses.replace(sources, metrics=dict(logged.PLACES), calls=calls)
            return dataclasses.replace(ledger, sources=sources).to_json()
        except Exception as error:  # noqa: BLE001 - it is an addition to the report
            return RankLedger(error=one_line(error)).to_json()


def _outside() -> tuple[str, Phase]:
    """Between traced steps."""
    return "", Phase.OTHER


def changed(edits: Edits, messages: Sequence[Any], once: folded.Once) -> ChangedCode | None:
    """Where changed code ran on any rank; ``None`` if nothing was changed.

    ``messages``: :meth:`Recording.message` of each rank.
    """
    if not edits.functions:
        return None
    places: dict[int, dict[tuple[str, Phase], None]] = {}
    is_whole = True
    for message in messages:
        executed = message.get("executed", {})
        is_whole = is_whole and executed.get("error") == ""
        for number, module, phase in once(_EXECUTED, executed.get("ran", [])):
            places.setdefault(number, {})[module, phase] = None
    functions = []
    for number, edit in enumerate(edits.functions):
        ran = places.get(number, {})
        is_known = is_whole and edit.is_seen
        state = Execution.NOT_RUN if is_known else Execution.NOT_KNOWN
        functions.append(
            ChangedFunction(
                file=edit.file,
                function=edit.function,
                line=edit.line,
                ran=Execution.ELSEWHERE if ran else state,
                modules=tuple(dict.fromkeys(module for module, _ in ran if module)),
                phases=tuple(dict.fromkeys(phase for _, phase in ran)),
                replaces=edit.replaces,
                parts=edit.parts,
            )
        )
    return ChangedCode(edits.since, tuple(functions))


def merged(
    meshes: Sequence[Mesh],
    messages: Sequence[Any],
    args: MegatronArguments,
    once: folded.Once,
    reference: TraceReader | None = None,
) -> tuple[Ledger, list[str]]:
    """The ledger of all ranks, and notices of what is missing in it. Never raises.

    ``messages``: :meth:`Recording.message` of each rank. ``reference``: has the calls of
    functions that these are compared with.
    """
    try:
        ranks = [decoded(message, once) for message in messages]
        compute, gradients = reduced_in(args)
        ledger = collectives.merge(
            ranks, lambda members: axes_of(members, meshes), compute=compute, gradients=gradients
        )
        sizes = [mesh.size(axis) for mesh in meshes[:1] for axis in ("tp", "cp", "ep")]
        factor = next((rank.factor for rank in ranks if rank.norms), 1.0)
        stages = (mesh.at("pp") for mesh in meshes)
        calls = [(at, rank.norms) for at, rank in zip(stages, ranks, strict=True) if rank.norms]
        wanted = {(call.function, call.module) for _, norms in calls for call in norms}
        theirs = read_calls(reference, wanted) if reference and wanted else ()
        compared = agreements(calls, theirs, sizes, factor)
    except Exception as error:  # noqa: BLE001 - it is an addition to the report
        return UNRECORDED, [f"the collectives were not recorded ({one_line(error)})"]
    lost = [f"rank {rank}: {record.error}" for rank, record in enumerate(ranks) if record.error][:1]
    ledger = dataclasses.replace(ledger, unseen=unseen_axes(args), compared=compared)
    notices = [f"not all collectives were recorded ({error})" for error in lost]
    for rank, message in enumerate(messages):
        if why := message.get("executed", {}).get("unrecorded"):
            text = "not all functions that ran were recorded, so places to look at may be missing"
            notices.append(f"{text} (rank {rank}: {why})")
            break
    return ledger, notices


def decoded(message: dict[str, Any], once: folded.Once) -> RankLedger:
    """The record of a rank, in which little is only its own. Raises ``CodecError``."""
    ledger = RankLedger(
        once(_CALLS, message["calls"]),
        once.each(_SIZES, message["sizes"]),
        once.each(_GROUP, message["groups"]),
        once(_SOURCES, message["sources"]),
        str(message["error"]),
        once(_NUMBERS, message["numbers"]),
        once(_SHARDS, message["shards"]),
        once(_APART, message["apart"]),
        once(_NORMS, message["norms"]),
        float(message["factor"]),
    )
    if why := ledger.contradiction():
        raise codec.CodecError(why)
    return ledger
