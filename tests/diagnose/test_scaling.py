# SPDX-License-Identifier: Apache-2.0
"""Factors that say more than their size."""

import dataclasses

import pytest

from megatron_ttrace.diagnose import scaling
from megatron_ttrace.trace.findings import ConstantFactor
from megatron_ttrace.trace.records import Kind
from tests.diagnose.evidence_by_hand import OUTPUT, evidence_of, hint, meshes, values


@pytest.mark.parametrize("expected", [2.0, 1.0])
def test_values_that_no_number_of_microbatches_divides(expected: float) -> None:
    """The reference, which has more microbatches, has the same ones."""
    key = dataclasses.replace(OUTPUT, kind=Kind.GRAD_OUTPUT)
    half = dict.fromkeys((0, 1), values(8, 4) / 2)
    evidence = evidence_of(values(8, 4), meshes(2), half, key=key)
    evidence.parts = [dataclasses.replace(part, factor=expected) for part in evidence.parts]
    finding = scaling.factor(evidence)
    assert isinstance(finding, ConstantFactor)
    assert finding.unscaled is (expected == 2)
    words = hint(finding)
    assert ("no division by their number" in words) is finding.unscaled
    assert words.endswith("a doubled division, or a missing factor or reduction over dp")


@pytest.mark.parametrize(
    ("kind", "is_share"), [(Kind.METRIC, False), (Kind.GRAD_INPUT, True), (Kind.GRAD_INPUT, False)]
)
def test_what_recomputation_does_twice(kind: Kind, is_share: bool) -> None:
    """A logged sum, or a share of a gradient: a whole gradient would be computed once."""
    right, key = values(8, 4), dataclasses.replace(OUTPUT, kind=kind)
    evidence = evidence_of(right, meshes(1), {0: 2 * right}, key=key, numbers={"passes": 2.0})
    evidence.share_of = right if is_share else None
    finding = scaling.factor(evidence)
    assert isinstance(finding, ConstantFactor)
    assert ("passes" in finding.axes) is (kind is Kind.METRIC or is_share)
