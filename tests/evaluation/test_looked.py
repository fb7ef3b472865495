# SPDX-License-Identifier: Apache-2.0
"""The places of a report against what was changed."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_ttrace.evaluation.looked import Looked, looked
from megatron_ttrace.trace.places import Clue, Place
from tests.report.synthetic_report import embedding_bug

RIGHT = Place("megatron/core/a.py", 3, "A.forward", Clue.RAN)
INSIDE = dataclasses.replace(RIGHT, function="A.forward.hook")
BESIDE = dataclasses.replace(RIGHT, function="A.forward2")
PACKAGE = dataclasses.replace(RIGHT, file="megatron/core/a/__init__.py")
ELSEWHERE = dataclasses.replace(RIGHT, file="megatron/core/b.py")


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ((RIGHT,), Looked(True, True, True, True)),
        ((INSIDE,), Looked(True, True, True, True)),
        ((PACKAGE,), Looked(True, True, True, True)),
        ((BESIDE, ELSEWHERE), Looked(True, False, True, False)),
        ((ELSEWHERE, BESIDE, RIGHT), Looked(False, False, True, True)),
        ((ELSEWHERE,) * 3 + (RIGHT,), Looked(False, False, False, False)),
        ((), Looked(False, False, False, False)),
    ],
)
def test_looked(places: tuple[Place, ...], expected: Looked) -> None:
    """By file and function, of the first culprit."""
    first = embedding_bug()[0].culprits[0]
    culprits = [
        dataclasses.replace(first, places=places),
        dataclasses.replace(first, places=(RIGHT,)),
    ]
    assert looked(culprits, [("megatron.core.a", "A.forward")]) == expected
    assert not looked([], [("megatron.core.a", "A.forward")]).file_first
