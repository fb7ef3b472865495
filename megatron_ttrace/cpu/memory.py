# SPDX-License-Identifier: Apache-2.0
"""Memory statistics and device properties that Megatron logs or sizes buffers by.

There is no caching allocator on the CPU, so every statistic is zero and emptying the cache does
nothing. None of these numbers enters the training arithmetic.
"""

import os
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch

from megatron_ttrace.cpu.devices import CAPABILITY


def _total_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        name="cpu",
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        total_memory=_total_memory(),
        multi_processor_count=os.cpu_count() or 1,
        uuid="cpu",
        gcnArchName="",
        warp_size=32,
        L2_cache_size=0,
    )


def install() -> None:
    """Replace the memory queries of ``torch.cuda``."""
    cuda: Any = torch.cuda
    for name in (
        "device_memory_used max_memory_allocated max_memory_reserved memory_allocated "
        "memory_reserved clock_rate power_draw temperature utilization"
    ).split():
        for module in (cuda, cuda.memory):
            if hasattr(module, name):
                setattr(module, name, lambda device=None: 0)
    for name in (
        "empty_cache ipc_collect reset_peak_memory_stats reset_max_memory_allocated "
        "reset_accumulated_memory_stats _record_memory_history _dump_snapshot"
    ).split():
        for module in (cuda, cuda.memory):
            if hasattr(module, name):
                setattr(module, name, lambda *args, **kwargs: None)
    cuda.memory_stats = cuda.memory.memory_stats = lambda device=None: defaultdict(int)
    cuda.memory_summary = cuda.memory.memory_summary = lambda *args, **kwargs: ""
    cuda.memory_snapshot = cuda.memory.memory_snapshot = lambda *args, **kwargs: []
    cuda.memory._snapshot = lambda *args, **kwargs: {"segments": [], "device_traces": []}
    cuda.mem_get_info = cuda.memory.mem_get_info = lambda device=None: (
        _total_memory(),
        _total_memory(),
    )
    cuda.get_device_properties = _properties
