# SPDX-License-Identifier: Apache-2.0
"""Synthetic checks: a healthy one, and two with a known bug, without running Megatron."""

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

from megatron_ttrace.report.table import tally
from megatron_ttrace.trace.collectives import (
    CollectiveRow,
    LedgerFault,
    LedgerFinding,
    Operation,
    Phase,
    RanHere,
)
from megatron_ttrace.trace.findings import Cause
from megatron_ttrace.trace.judged import Judged
from megatron_ttrace.trace.outcomes import Reason
from megatron_ttrace.trace.records import (
    STEP_LEVEL,
    Culprit,
    Direction,
    Kind,
    Outcome,
    Result,
    Summary,
    Verdict,
)

EPS = 2.0**-7
MODULES = (
    "input_layernorm",
    "self_attention.linear_qkv",
    "self_attention.core_attention",
    "self_attention.linear_proj",
    "self_attention",
    "pre_mlp_layernorm",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
    "mlp",
    "",
)
WEIGHTS = (
    "input_layernorm.weight",
    "self_attention.linear_qkv.weight",
    "self_attention.linear_proj.weight",
    "pre_mlp_layernorm.weight",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc2.weight",
)
ROW = CollectiveRow(
    operation=Operation.REDUCE_SCATTER,
    reduction="sum",
    group="dp-cp",
    size=4,
    dtype="float32",
    least=512,
    most=3 << 20,
    module="",
    modules=1,
    direction=Phase.GRADIENTS,
    where="megatron/core/b.py:2 (sync)",
    count=3,
)
"""Collectives of all layers."""
COUNT = LedgerFinding(
    fault=LedgerFault.COUNT,
    group="tp",
    members=(0, 1),
    ran=(RanHere((0,), 2, "decoder.layers.0", "a.py:1 (f)"), RanHere((1,), 0)),
    operation=Operation.ALL_REDUCE,
    reduction="sum",
    dtype="float32",
    bytes=64,
)
"""A fault of collectives."""


def make_verdict(
    name: str = "decoder.layers.0.mlp",
    kind: Kind = Kind.OUTPUT,
    *,
    rel_err: float | None = 1e-3,
    tolerance: float | None = 2e-3,
    **fields: Any,
) -> Verdict:
    """A verdict whose numbers agree with each other; a pass without other ``fields``."""
    measured = rel_err is not None
    values = {
        "iteration": 1,
        "microbatch": 0,
        "index": 0,
        "verdict": Outcome.PASS,
        "ranks": (0, 1),
        "placement": "Shard(0)",
        "shape": (64, 2, 128),
        "rel_err_eps": rel_err / EPS if measured else None,
        "margin": rel_err / tolerance if measured and tolerance else None,
    }
    return Verdict(name=name, kind=kind, rel_err=rel_err, tolerance=tolerance, **values | fields)


def make_judged(*place: Any, **more: Any) -> Judged:
    """The same before it is put into words; ``notes``, and arguments of :func:`make_verdict`."""
    notes = more.pop("notes", ())
    values = dataclasses.asdict(make_verdict(*place, **more))
    return Judged(**{name: value for name, value in values.items() if name != "note"}, notes=notes)


def modules(layers: int) -> list[str]:
    """Canonical module names in execution order."""
    names = ["embedding.word_embeddings", "embedding"]
    for layer in range(layers):
        names += [f"decoder.layers.{layer}.{tail}".rstrip(".") for tail in MODULES]
    return [*names, "decoder.final_layernorm", "output_layer"]


def parameters(layers: int) -> list[str]:
    """Canonical parameter names."""
    names = ["embedding.word_embeddings.weight"]
    for layer in range(layers):
        names += [f"decoder.layers.{layer}.{tail}" for tail in WEIGHTS]
    return [*names, "decoder.final_layernorm.weight", "output_layer.weight"]


def keys(layers: int, microbatches: int) -> Iterator[tuple[int, Kind, str]]:
    """Everything that a training step traces, in execution order."""
    for name in parameters(layers):
        yield STEP_LEVEL, Kind.PARAM, name
    for microbatch in range(microbatches):
        yield microbatch, Kind.TOKENS, "tokens"
        for name in modules(layers):
            yield microbatch, Kind.INPUT, name
            yield microbatch, Kind.OUTPUT, name
        yield microbatch, Kind.LOSS, "loss"
        for name in reversed(modules(layers)):
            yield microbatch, Kind.GRAD_OUTPUT, name
            yield microbatch, Kind.GRAD_INPUT, name
    for name in parameters(layers):
        yield STEP_LEVEL, Kind.MAIN_GRAD, name
    yield STEP_LEVEL, Kind.GRAD_NORM, "grad_norm"
    for kind in (Kind.PARAM_DELTA, Kind.EXP_AVG, Kind.EXP_AVG_SQ):
        for name in parameters(layers):
            yield STEP_LEVEL, kind, name


def healthy_verdicts(layers: int = 4, microbatches: int = 4, seed: int = 0) -> list[Verdict]:
    """Rounding everywhere, well inside its tolerance; one tensor in fifty blind."""
    rng = random.Random(seed)
    verdicts = []
    for position, (microbatch, kind, name) in enumerate(keys(layers, microbatches)):
        tolerance = 4e-3 * (1 + position % 7)
        exact = kind in (Kind.TOKENS, Kind.PARAM)
        blind = kind is Kind.GRAD_INPUT and position % 50 == 0
        verdicts.append(
            make_verdict(
                name,
                kind,
                microbatch=microbatch,
                verdict=Outcome.UNCHECKED if blind else Outcome.PASS,
                rel_err=0.0 if exact else tolerance * rng.uniform(0.2, 0.7),
                tolerance=tolerance,
                ranks=(0, 1, 2, 3),
                note="blind: tolerance 0.8 is too wide" if blind else "",
                reason=Reason.BLIND if blind else None,
            )
        )
    return verdicts


def make_summary(verdicts: list[Verdict], culprits: tuple[Culprit, ...] = ()) -> Summary:
    """The summary that belongs to these verdicts."""
    failed = any(verdict.verdict.is_failure for verdict in verdicts)
    return Summary(
        verdict=Result.DIVERGED if failed else Result.EQUIVALENT,
        counts=tally(verdicts),
        culprits=culprits,
        config={
            "tp": 2,
            "pp": 2,
            "vpp": 1,
            "cp": 1,
            "ep": 1,
            "etp": 1,
            "dp": 1,
            "world_size": 4,
            "dtype": "bf16",
            "sequence_parallel": True,
            "iterations": [1],
        },
        versions={"megatron-core": "0.19.2", "torch": "2.15", "megatron-ttrace": "0.1.0"},
        timings={"reference": 8.1, "candidate": 9.25, "compare": 0.41},
        execution_order=tuple(modules(4)),
        notices=("dropout is off during the check",),
    )


def culprit_of(verdict: Verdict, reason: str, explanation: str, **more: Any) -> Culprit:
    """The culprit that this verdict shows; ``more`` fields of it."""
    shared = {field.name for field in dataclasses.fields(Culprit)} & {
        field.name for field in dataclasses.fields(Verdict)
    }
    values = {name: getattr(verdict, name) for name in shared - {"reason"}}
    values |= {"direction": verdict.kind.direction, "axes": ("tp",), **more}
    return Culprit(reason=reason, explanation=explanation, **values)


def embedding_bug(layers: int = 4, microbatches: int = 4) -> tuple[Summary, list[Verdict]]:
    """Known bug 01: the embedding masks wrong rows, and everything after it diverges."""
    verdicts = []
    born = False
    for verdict in healthy_verdicts(layers, microbatches):
        if verdict.kind is Kind.OUTPUT and verdict.name == "embedding.word_embeddings":
            born = True
        untouched = verdict.kind in (Kind.PARAM, Kind.TOKENS) or (
            verdict.kind is Kind.INPUT and verdict.name.startswith("embedding")
        )
        if born and not untouched:
            depth = len(verdicts) % 90
            verdict = make_verdict(
                verdict.name,
                verdict.kind,
                microbatch=verdict.microbatch,
                verdict=Outcome.DIVERGED,
                rel_err=0.205 / (1 + depth / 30),
                tolerance=verdict.tolerance,
                ranks=(1, 3),
                note="an exact zero on 50% of rows",
            )
        verdicts.append(verdict)
    first = next(v for v in verdicts if v.verdict.is_failure)
    culprit = culprit_of(
        first,
        "its input passes and its output does not",
        "half of the rows are zero on tp rank 1",
        hint="the vocabulary mask is computed from shifted ids",
        where="VocabParallelEmbedding in megatron/core/tensor_parallel/layers.py:185",
        cause=Cause.TOKEN_IDS,
    )
    return make_summary(verdicts, (culprit,)), verdicts


def norm_bug() -> tuple[Summary, list[Verdict]]:
    """Known bug 11: a norm's gradient is not reduced over the sequence-parallel ranks."""
    verdicts = []
    for verdict in healthy_verdicts():
        name = "decoder.final_layernorm.weight"
        if verdict.name == name and verdict.kind is Kind.MAIN_GRAD:
            verdict = dataclasses.replace(
                verdict,
                verdict=Outcome.REPLICA_CONFLICT,
                rel_err=0.71,
                rel_err_eps=0.71 / EPS,
                margin=0.71 / (verdict.tolerance or 1),
                note="replicas on ranks 2 and 3 differ and sum to the reference",
            )
        verdicts.append(verdict)
    bad = next(v for v in verdicts if v.verdict.is_failure)
    culprit = culprit_of(
        bad,
        "activations and their gradients pass, the main gradient differs between replicas",
        "replicas differ and sum to the reference",
        hint="a partial sum over tp was never reduced",
        where="finalize_model_grads in megatron/core/distributed/finalize_model_grads.py:427",
        cause=Cause.PARTIAL,
    )
    assert culprit.direction is Direction.GRADIENT
    return make_summary(verdicts, (culprit,)), verdicts
