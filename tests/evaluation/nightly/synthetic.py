# SPDX-License-Identifier: Apache-2.0
"""Nights made by hand, and rows as the commands print them."""

from __future__ import annotations

from typing import Any

from megatron_ttrace.evaluation.nightly.records import Night, NightCase, NightPart, State

VERSIONS = {"megatron-core": "0.19.2", "torch": "2.15.0"}
OPTIONS = {"parts": "bugs matrix recipes", "bugs": "all"}


def case(
    part: NightPart = NightPart.BUGS, name: str = "01", state: State = State.GOOD, **more: Any
) -> NightCase:
    return NightCase(part, name, state, **more)


def night(*cases: NightCase, day: int = 1, **more: Any) -> Night:
    values: dict[str, Any] = {
        "began": f"2026-01-{day:02d}T02:00:00+00:00",
        "seconds": 600.0,
        "versions": VERSIONS,
        "options": OPTIONS,
        "cases": cases or (case(), case(NightPart.MATRIX, "tp2/gpt/fp32", margin=0.2)),
    }
    return Night(**{**values, **more})


def nights() -> list[Night]:
    """Good nights, and a bad one: a bug is missed and a version has changed."""
    good, bad = (
        [
            case(name="01 tp-embedding-mask [TP 2]", state=state, margin=margin, note="a\nb"),
            case(name="13 tp-cp-layernorm [TP 2 SP CP 2 FP8 hybrid]", margin=5.3),
            case(NightPart.MATRIX, "tp2/gpt/fp32", margin=0.23),
        ]
        for state, margin in ((State.GOOD, 65.6), (State.MISSED, None))
    )
    return [
        night(*good),
        night(*good, day=2),
        night(*bad, day=3, versions={**VERSIONS, "torch": "2.16.0"}),
    ]


def bug_row(**changes: Any) -> dict[str, Any]:
    """As ``ttrace bugs run --rows`` writes it."""
    return {
        "id": "01",
        "name": "tp-embedding-mask",
        "nproc": 2,
        "layout": "TP 2",
        "arguments": ["--tensor-model-parallel-size", "2"],
        "healthy": True,
        "detected": True,
        "localised": True,
        "explained": True,
        "margin": "65.6",
        "healthy_margin": "0.2",
        "culprits": [{"explanation": "they all hold row 0"}],
        "looked": None,
        "met": True,
        "problem": "",
        "seconds": 4.8,
        **changes,
    }


def matrix_row(**changes: Any) -> dict[str, Any]:
    """As ``ttrace matrix --json`` prints it."""
    return {
        "name": "tp2/gpt/fp32",
        "verdict": "equivalent",
        "tensors": 698,
        "unchecked": 0,
        "worst_margin": 0.25,
        "worst": "decoder.final_layernorm main_grad.0",
        "seconds": 3.0,
        "why": "",
        **changes,
    }
