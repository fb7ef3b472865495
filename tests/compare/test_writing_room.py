# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from megatron_ttrace.compare.writing import WriteSink
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.records import STEP_LEVEL, Kind
from megatron_ttrace.trace.store import TraceWriter

FORWARD = [
    (STEP_LEVEL, Kind.PARAM, "m.weight", 0),
    (0, Kind.TOKENS, "tokens", 0),
    (1, Kind.TOKENS, "tokens", 0),
    (0, Kind.INPUT, "m", 0),
    (0, Kind.OUTPUT, "m", 0),
]


@pytest.mark.parametrize("end", [(0, Kind.GRAD_OUTPUT, "m", 0), (1, Kind.INPUT, "m", 0)])
def test_the_size_of_a_trace_is_foreseen(tmp_path, end):
    """Once, when the first microbatch goes back or the second begins: bytes of its activations."""
    foreseen = []
    sink = WriteSink(TraceWriter(tmp_path, 0), 1, foreseen.append)
    for place in FORWARD:
        sink.tensor((place,), torch.zeros(25))
    assert foreseen == []
    for place in (end, (1, Kind.OUTPUT, "m", 0)):
        sink.tensor((place,), torch.zeros(25))
    assert foreseen == [200]


def test_what_has_no_room_is_not_written(tmp_path):
    """An error ends the capture."""

    def refuse(size):
        raise TTraceError(f"no room for {size}")

    sink = WriteSink(TraceWriter(tmp_path, 0), 1, refuse)
    for place in FORWARD:
        sink.tensor((place,), torch.zeros(25))
    with pytest.raises(TTraceError, match="no room for 200"):
        sink.tensor(((1, Kind.INPUT, "m", 0),), torch.zeros(25))
