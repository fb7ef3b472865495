# SPDX-License-Identifier: Apache-2.0
"""Streams, events, NVTX ranges and profiler calls of CUDA, on a device that has one queue.

Megatron orders its overlapped communication with side streams and events. A CPU tensor operation
has finished when the call returns, so every order that a stream or an event could enforce already
holds: waiting is a no-op and every query answers "done". Work that gloo does asynchronously is
waited for through its own ``Work`` handles, which stay the real ones.
"""

import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch


class Stream:
    """In place of ``torch.cuda.Stream``."""

    cuda_stream = 0
    stream_id = 0
    device_index = 0

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.device = torch.device("cpu")
        self.priority = priority

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Lowest and highest priority, in the order CUDA gives them."""
        return (0, -1)

    def wait_stream(self, stream: Any) -> None:
        """Return at once: the other stream's work is done."""

    def wait_event(self, event: Any) -> None:
        """Return at once: the event has happened."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Answer that all work has finished."""
        return True

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Return an event that has happened."""
        event = event or Event()
        event.record(self)
        return event

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *exc: object) -> None:
        return None


class Event:
    """In place of ``torch.cuda.Event``; timing uses the host's clock."""

    def __init__(self, enable_timing: bool = False, **kwargs: Any) -> None:
        self._at = 0.0

    def record(self, stream: Any = None) -> None:
        """Remember the time."""
        self._at = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Answer that the event has happened."""
        return True

    def elapsed_time(self, end_event: "Event") -> float:
        """Milliseconds from this event to ``end_event``."""
        return (end_event._at - self._at) * 1000.0


class StreamContext:
    """In place of ``torch.cuda.stream(...)``."""

    def __init__(self, stream: Any = None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc: object) -> None:
        return None


_THE_STREAM = Stream()


def install() -> None:
    """Replace streams, events, NVTX and the profiler's start and stop."""
    cuda: Any = torch.cuda
    cuda.Stream = cuda.ExternalStream = Stream
    cuda.Event = Event
    cuda.stream = cuda.StreamContext = StreamContext
    cuda.current_stream = cuda.default_stream = lambda device=None: _THE_STREAM
    cuda.set_stream = lambda stream: None
    cuda.synchronize = lambda device=None: None
    cuda.is_current_stream_capturing = lambda: False
    cuda._sleep = lambda cycles: None

    cuda.nvtx.range_push = lambda msg: 0
    cuda.nvtx.range_pop = lambda: 0
    cuda.nvtx.mark = lambda msg: 0
    cuda.nvtx.range = lambda msg, *args, **kwargs: nullcontext()
    cuda.profiler.start = cuda.profiler.stop = lambda: None
    cuda.check_error = lambda code: None
    runtime = SimpleNamespace(cudaProfilerStart=lambda: 0, cudaProfilerStop=lambda: 0)
    cuda.cudart = lambda: runtime
