# SPDX-License-Identifier: Apache-2.0
"""Nights made by hand, and rows as the commands print them."""

from __future__ import annotations

from typing import Any

from megatron_ttrace.evaluation.nightly.records import Gap, Night, NightCase, NightPart, State

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


def month(days: int = 12) -> list[Night]:
    """Good nights, a missed bug on the last; a version changed in between."""
    found = []
    for day in range(1, days + 1):
        missed = day == days
        found.append(
            night(
                case(
                    name="01 tp-embedding-mask [TP 2]",
                    state=State.MISSED if missed else State.GOOD,
                    margin=None if missed else 65.6 + day,
                    marks="" if missed else "detected, localised, explained",
                    note="found equivalent" if missed else "they all hold row 0 of the table",
                ),
                case(name="13 tp-cp-layernorm [TP 2 SP CP 2 FP8 hybrid]", margin=5.0 + day / 10),
                case(NightPart.MATRIX, "tp2/gpt/fp32", margin=0.2 + day / 100),
                case(NightPart.MATRIX, "dp2/gpt/bf16", state=State.ALARM, margin=1.3)
                if day == 4
                else case(NightPart.MATRIX, "dp2/gpt/bf16", margin=0.3),
                day=day,
                versions={**VERSIONS, "torch": "2.16.0" if missed else "2.15.0"},
                gaps=(Gap(NightPart.RECIPES, "switched off", by_choice=True),) if day == 2 else (),
            )
        )
    return found


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
