# SPDX-License-Identifier: Apache-2.0
"""Findings survive the journey to rank 0, whatever numbers are in them."""

import json
import math

from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.compare.gathered import Holding, of_rank
from megatron_ttrace.compare.measure import Sums
from megatron_ttrace.compare.measured import Measured, Problem
from megatron_ttrace.compare.wire import decode, encode
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.trace.findings import Note, Remark
from megatron_ttrace.trace.moments import Moments
from megatron_ttrace.trace.records import Kind, TraceKey

numbers = st.floats(allow_nan=True, allow_infinity=True)
totals = st.floats(min_value=0) | st.just(math.nan)
dims = st.integers(0, 2**40)
sums = st.builds(
    Sums,
    n=dims,
    diff=totals,
    reference=totals,
    candidate=totals,
    dot=numbers,
    worst=totals,
    nonfinite=dims,
    checksum=st.integers(0, 2**64 - 1),
)
boxes = st.lists(dims, max_size=3).map(
    lambda sizes: Box(tuple(sizes), tuple(n + 1 for n in sizes), tuple(sizes) or (7,))
)
moments = st.builds(
    Moments,
    n=dims,
    **dict.fromkeys(("sum", "cubes", "least", "most"), numbers),
    **dict.fromkeys(("squares", "fourths"), totals),
    nonfinite=dims,
    checksum=st.integers(0, 2**64 - 1),
)
findings = st.builds(
    Measured,
    key=st.builds(
        TraceKey,
        iteration=st.integers(1, 9),
        microbatch=st.integers(-1, 9),
        kind=st.sampled_from(Kind),
        name=st.text(max_size=9),
        index=st.integers(0, 3),
    ),
    placement=st.sampled_from(["", "Replicate", "tp:Shard(0)"]),
    boxes=st.lists(boxes, max_size=2).map(tuple),
    logical_shape=st.lists(dims, max_size=3).map(tuple),
    sums=st.none() | sums,
    problem=st.none() | st.sampled_from(Problem),
    note=st.none() | st.builds(Note, st.sampled_from(Remark), text=st.text(max_size=9)),
    moments=st.none() | moments,
)


def same(a, b):
    """Equality in which NaN is itself."""
    return repr(a) == repr(b)


held = st.builds(
    Holding,
    ranks=st.sets(st.integers(0, 99), min_size=1).map(sorted).map(tuple),
    copies=st.integers(1, 99),
    measured=findings,
)


@given(st.lists(held, max_size=6))
def test_round_trip(measured):
    """Through strict JSON, as it travels."""
    sent = json.dumps(encode(measured), allow_nan=False)
    assert same(decode(json.loads(sent)), measured)


def test_parts_travel_once():
    """A thousand tensors of one layout cost a number each, not their boxes."""
    box = Box((0, 0), (4, 4), (0, 0))
    one = Measured(TraceKey(1, 0, Kind.OUTPUT, "a"), "Replicate", (box,), (4, 4), Sums(n=16))
    message = encode(of_rank(0, [one] * 1000))
    assert len(message["parts"]) == 1
    assert decode(json.loads(json.dumps(message))) == of_rank(0, [one] * 1000)
