# SPDX-License-Identifier: Apache-2.0
"""Culprits and mutants made by hand."""

from typing import Any

from megatron_ttrace.trace.records import Culprit, Kind, Outcome
from tests.assay.mutants.records import Mutant, Span


def culprit(name: str, kind: Kind = Kind.OUTPUT, **more: Any) -> Culprit:
    """One with the fields that are judged."""
    values: dict[str, Any] = {
        "name": name,
        "kind": kind,
        "direction": kind.direction,
        "reason": "",
        "iteration": 0,
        "explanation": "",
        "microbatch": 0,
        "index": 0,
        "verdict": Outcome.DIVERGED,
        "ranks": (0,),
        "rel_err": 1.0,
        "rel_err_eps": 1.0,
        "tolerance": 0.1,
        "margin": 10.0,
    }
    return Culprit(**{**values, **more})


def mutant(operator: str = "lost-scale", statement: str = "", **more: Any) -> Mutant:
    """One with the fields that are judged."""
    values: dict[str, Any] = {"module": "megatron.core.tensor_parallel.x", "qualname": "f"}
    values |= {"span": Span(1, 0, 1, 1), "fragment": statement, "replacement": "y"}
    return Mutant("m:f:o:0", operator=operator, statement=statement, **{**values, **more})
