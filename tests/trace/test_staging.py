# SPDX-License-Identifier: Apache-2.0
"""Staging to a GPU, with streams and events that only record; the device is the CPU.

A copy that the GPU has not made yet is made when its event is waited for, from what the buffer
holds by then: one that is filled too early arrives wrong.
"""

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ttrace.trace import staging

CPU = torch.device("cpu")


class Stream:
    """Copies that were queued and not made."""

    def __init__(self, *_):
        self.queue = []
        self.waited_for = []

    def wait_stream(self, other):
        self.waited_for.append(other)


class Event:
    """Makes the copies that were queued before it was recorded."""

    stream = None
    upto = 0

    def record(self, stream):
        self.stream, self.upto = stream, len(stream.queue)

    def synchronize(self):
        if self.stream:
            for number in range(self.upto):
                self.stream.queue[number]()
                self.stream.queue[number] = lambda: None


@pytest.fixture(scope="module")
def gpu():
    """Training's stream, and the patched functions of torch."""
    training, plain = Stream(), torch.Tensor.copy_
    active = []

    @contextlib.contextmanager
    def within(stream):
        active.append(stream)
        yield
        active.pop()

    def copy_(self, source, non_blocking=False):
        if not non_blocking:
            return plain(self, source)
        active[-1].queue.append(lambda: plain(self, source))
        return self

    empty = torch.empty
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "stream", within)
        patch.setattr(torch.cuda, "current_stream", lambda device: training)
        patch.setattr(torch.Tensor, "copy_", copy_)
        patch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
        patch.setattr(torch, "empty", lambda *a, pin_memory=False, **more: empty(*a, **more))
        patch.setattr(staging, "_BUFFER", 64)
        patch.setattr(staging, "_SMALL", 32)
        yield training


@settings(max_examples=40)
@given(
    shapes=st.lists(st.lists(st.integers(1, 9), max_size=3), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
    turned=st.booleans(),
)
def test_what_arrives(gpu, shapes, dtype, turned):
    """Every element of tensors of any strides, larger than a buffer or not, there and back."""
    made = staging.Stage(CPU)
    sent = [torch.randn(shape).mul(9).to(dtype) for shape in shapes]
    if turned:
        sent = [tensor.transpose(0, -1) if tensor.ndim else tensor for tensor in sent]
    arrived = [made.copy(tensor) for tensor in sent]
    assert gpu.waited_for[-1] is made._stream
    for event in made._fetched:
        event.synchronize()
    fetched = [made.fetch(tensor) for tensor in sent]
    for tensor, *copies in zip(sent, arrived, fetched, strict=True):
        for copy in copies:
            assert torch.equal(tensor, copy)
            assert copy.is_contiguous()


def test_the_host_runs_at_most_two_buffers_ahead(gpu):
    """Before a third piece is put in the first buffer, the first piece was fetched."""
    made = staging.Stage(CPU)
    there = made.copy(torch.ones(3, 16))
    assert [bool((row == 1).all()) for row in there] == [True, False, False]
    assert len(made._buffers) == 2
