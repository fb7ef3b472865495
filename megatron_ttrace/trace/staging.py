# SPDX-License-Identifier: Apache-2.0
"""Copies between the host and a GPU: two pinned buffers, and a stream beside training's.

Only pinned memory can be copied without waiting, and files are not mapped to any. While the GPU
fetches one buffer, the host fills the other. So pinned memory is bounded, training's stream waits
for a copy only where it is used, and the host waits for the GPU only where that is two buffers
behind. One thread fills a buffer at less than a tenth of a GPU's rate, so several do.
"""

import functools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

_BUFFER = 32 << 20
"""Bytes of each of the two buffers."""
_THREADS = 4
_SMALL = 1 << 20
"""Bytes that one thread copies in less time than several take to begin."""


class Stage:
    """The way to one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._buffers = [torch.empty(_BUFFER, dtype=torch.uint8, pin_memory=True) for _ in "ab"]
        self._fetched = [torch.cuda.Event() for _ in self._buffers]
        self._next = 0
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(_THREADS)

    def copy(self, data: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor of the host, for the current stream; contiguous."""
        with self._lock, torch.cuda.stream(self._stream):
            # Memory of this stream: that of training's would be free only after its kernels.
            copy = torch.empty(data.shape, dtype=data.dtype, device=self._device)
            for source, target in _pieces(data.detach(), copy):
                fetched, buffer = self._fetched[self._next], self._buffers[self._next]
                self._next = 1 - self._next
                fetched.synchronize()
                pinned = buffer[: source.nbytes].view(source.dtype).view(source.shape)
                self._fill(pinned, source)
                target.copy_(pinned, non_blocking=True)
                fetched.record(self._stream)
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        copy.record_stream(current)
        return copy

    def fetch(self, data: torch.Tensor) -> torch.Tensor:
        """A copy on the host of a tensor that the current stream makes; contiguous."""
        data = data.detach().contiguous()
        copy = torch.empty(data.shape, dtype=data.dtype)
        with self._lock:
            for source, target in _pieces(data, copy):
                self._fetched[0].synchronize()
                pinned = self._buffers[0][: source.nbytes].view(source.dtype).view(source.shape)
                pinned.copy_(source)
                self._fill(target, pinned)
        return copy

    def _fill(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy within the host. New memory takes longer: its pages are made first."""
        if source.nbytes < _SMALL or not source.is_contiguous():
            target.copy_(source)
            return
        parts = (flat.view(-1).chunk(_THREADS) for flat in (target, source))
        list(self._threads.map(torch.Tensor.copy_, *parts))


def _pieces(
    source: torch.Tensor, target: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Both in corresponding pieces that fit in a buffer; a source of any strides is not copied."""
    if source.nbytes <= _BUFFER:
        yield source, target
    elif source.shape[0] > 1 and source.nbytes // source.shape[0] <= _BUFFER:
        rows = _BUFFER * source.shape[0] // source.nbytes
        yield from zip(source.split(rows), target.split(rows), strict=True)
    else:
        for row, target_row in zip(source, target, strict=True):
            yield from _pieces(row, target_row)


@functools.cache
def _stage_to(device: torch.device) -> Stage:
    with torch.cuda.device(device):
        return Stage(device)


def to_device(data: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy to ``device`` without waiting for it."""
    if data.device == device:
        return data
    if device.type == "cuda" and data.device.type == "cpu" and data.numel():
        return _stage_to(device).copy(data)
    return data.to(device, non_blocking=True)


def to_host(data: torch.Tensor) -> torch.Tensor:
    """Copy to the host, and wait for it."""
    if data.is_cuda and data.numel():
        return _stage_to(data.device).fetch(data)
    return data.cpu()
