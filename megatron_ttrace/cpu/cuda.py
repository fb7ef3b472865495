# SPDX-License-Identifier: Apache-2.0
"""What Megatron asks ``torch.cuda`` for: queries, streams, memory statistics and random states.

*Streams and events.* Megatron orders its overlapped communication with side streams and events. A
CPU tensor operation has finished when the call returns, so every order that a stream or an event
could enforce already holds: waiting is a no-op and every query answers "done". Work that gloo does
asynchronously is waited for through its own ``Work`` handles, which stay the real ones.

*Memory.* There is no caching allocator, so every statistic is zero and emptying the cache does
nothing. None of these numbers enters the training arithmetic.

*Random states.* Megatron keeps one random state per purpose (data parallel, tensor parallel, expert
parallel) and swaps them in and out of the *CUDA* generator, because that is the one dropout and
weight initialisation draw from. On the CPU both draw from ``torch.default_generator``; so that
generator stands in for the CUDA one, and which ranks draw equal numbers stays exactly as on a GPU.
The price of one generator: what on a GPU draws from the CPU's must not move it. Two such places are
known, both undone: the data loader's seed, and the warm-up (``arguments.py``).
"""

import functools
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import DataLoader

# Hopper: it has bf16 and FP8, so Megatron refuses nothing for lack of a dtype, and it is not
# Blackwell, for which Megatron would choose kernels and memory layouts of its own.
CAPABILITY = (9, 0)


def _always(result: Any = None) -> Callable[..., Any]:
    """A new function each time: torch._dynamo has rules for torch.cuda's, by identity."""
    return lambda *args, **kwargs: result


class Stream:
    """In place of ``torch.cuda.Stream``: all work has finished."""

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

    wait_stream = wait_event = synchronize = _always()
    query = _always(True)

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Return an event that has happened."""
        event = event or Event()
        event.record(self)
        return event

    def __enter__(self) -> "Stream":
        return self

    __exit__ = _always()


class Event:
    """In place of ``torch.cuda.Event``: it has happened; timing uses the host's clock."""

    def __init__(self, enable_timing: bool = False, **kwargs: Any) -> None:
        self._at = 0.0

    def record(self, stream: Any = None) -> None:
        """Remember the time."""
        self._at = time.perf_counter()

    wait = synchronize = _always()
    query = _always(True)

    def elapsed_time(self, end_event: "Event") -> float:
        """Milliseconds from this event to ``end_event``."""
        return (end_event._at - self._at) * 1000.0


_THE_STREAM = Stream()
_chosen = [0]
"""The current device."""


def _device_count() -> int:
    """Give one device to each rank of the machine, so that every ``LOCAL_RANK`` has its own."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _choose(device: Any) -> None:
    """Remember the device that a rank chose: code that numbers ranks by it must not see one."""
    index = device if isinstance(device, int) else torch.device(device).index
    if index is not None and index >= 0:
        _chosen[0] = index


@contextmanager
def _on(device: Any) -> Iterator[None]:
    """In place of ``torch.cuda.device``, for which -1 and ``None`` are none."""
    before = _chosen[0]
    if device is not None:
        _choose(device)
    try:
        yield
    finally:
        _chosen[0] = before


def _install_queries(cuda: Any) -> None:
    for name in ("is_available", "is_initialized", "is_bf16_supported"):
        setattr(cuda, name, _always(True))
    for name in ("init", "_lazy_init"):
        setattr(cuda, name, _always())
    # Megatron hands its random-state callbacks to _lazy_call, to be run once CUDA is up.
    cuda._lazy_call = lambda callback, **_: callback()
    cuda.device_count = _device_count
    cuda.set_device, cuda.current_device = _choose, lambda: _chosen[0]
    cuda.device, cuda.device_of = _on, nullcontext
    cuda.get_device_capability = _always(CAPABILITY)
    cuda.get_device_name = _always("cpu")
    # Legacy type objects: used as constructors and in isinstance checks on a tensor's dtype.
    for kind in "Float Half BFloat16 Double Int Long Short Char Byte Bool".split():
        setattr(cuda, f"{kind}Tensor", getattr(torch, f"{kind}Tensor"))


@contextmanager
def _range(*args: Any, **kwargs: Any) -> Iterator[None]:
    """In place of ``torch.cuda.nvtx.range``, which is a decorator, too."""
    yield


def _install_streams(cuda: Any) -> None:
    cuda.Stream = cuda.ExternalStream = Stream
    cuda.Event = Event
    cuda.stream = cuda.StreamContext = nullcontext
    cuda.current_stream = cuda.default_stream = _always(_THE_STREAM)
    for name in ("set_stream", "synchronize", "_sleep", "check_error"):
        setattr(cuda, name, _always())
    # A graph computes what its module does.
    cuda.make_graphed_callables = lambda callables, *args, **kwargs: callables
    cuda.is_current_stream_capturing = _always(False)
    for name in ("range_push", "range_pop", "mark"):
        setattr(cuda.nvtx, name, _always(0))
    cuda.nvtx.range = _range
    cuda.profiler.start = cuda.profiler.stop = _always()
    cuda.cudart = _always(
        SimpleNamespace(cudaProfilerStart=_always(0), cudaProfilerStop=_always(0))
    )


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


def _install_memory(cuda: Any) -> None:
    numbers = (
        "device_memory_used max_memory_allocated max_memory_reserved memory_allocated "
        "memory_reserved clock_rate power_draw temperature utilization"
    )
    actions = (
        "empty_cache ipc_collect reset_peak_memory_stats reset_max_memory_allocated "
        "reset_accumulated_memory_stats _record_memory_history _dump_snapshot "
        "set_per_process_memory_fraction"
    )
    for module in (cuda, cuda.memory):
        for names, result in ((numbers, 0), (actions, None)):
            for name in names.split():
                if hasattr(module, name):
                    setattr(module, name, _always(result))
        module.memory_stats = lambda device=None: defaultdict(int)
        module.memory_summary = _always("")
        module.memory_snapshot = lambda *args, **kwargs: []
        module.mem_get_info = lambda device=None: (_total_memory(), _total_memory())
    cuda.memory._snapshot = lambda *args, **kwargs: {"segments": [], "device_traces": []}
    cuda.get_device_properties = _properties


class _Generators:
    """``torch.cuda.default_generators``: the same generator under every device index."""

    def __getitem__(self, index: int) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return torch.cuda.device_count()


def _keep(record: logging.LogRecord) -> bool:
    # Megatron warns when code inside its CUDA random context moves the CPU's generator, which
    # here is the same one: the warning would come with every initialised weight.
    return "CPU RNG state changed" not in record.getMessage()


def _install_random_states(cuda: Any) -> None:
    generator = torch.default_generator
    for module in (cuda, cuda.random):
        module.get_rng_state = lambda device="cuda": generator.get_state()
        module.set_rng_state = lambda new_state, device="cuda": generator.set_state(new_state)
        module.get_rng_state_all = lambda: [generator.get_state()]
        module.set_rng_state_all = lambda states: generator.set_state(states[0])
        # Not torch.manual_seed: that one calls back here, through torch.cuda.manual_seed_all.
        module.manual_seed = module.manual_seed_all = lambda seed: generator.manual_seed(int(seed))
        module.seed = module.seed_all = lambda: generator.seed()
        module.initial_seed = lambda: generator.initial_seed()
    cuda.default_generators = _Generators()
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_keep)


def _install_data_loader(cuda: Any) -> None:
    """The data loader sees a machine without accelerator, and leaves the random state alone.

    It pins batches when ``torch.accelerator`` finds a device, which is CUDA for a CUDA build of
    PyTorch. Every iterator also draws a seed for its workers from the CPU's generator. Only the
    first rank of a tensor-parallel group reads data, and the dropout masks have to stay in step on
    all of them, so the draw is undone.
    """
    accelerator: Any = torch.accelerator
    accelerator.is_available = _always(False)
    accelerator.current_accelerator = accelerator.synchronize = accelerator.empty_cache = _always()
    accelerator.device_count = accelerator.current_device_index = _always(0)
    accelerator.current_stream = _always(_THE_STREAM)
    accelerator.set_device_index = accelerator.set_stream = _always()
    loader: Any = DataLoader
    make_iterator = loader.__iter__

    @functools.wraps(make_iterator)
    def iterate(self: Any) -> Any:
        with torch.random.fork_rng(devices=()):
            return make_iterator(self)

    loader.__iter__ = iterate


def _install_attention(cuda: Any) -> None:
    """Every kernel of attention has one formula: a choice that leaves out the CPU's is not made."""
    del cuda
    for name in ("flash", "mem_efficient", "math", "cudnn"):
        setattr(torch._C, f"_set_sdp_use_{name}", _always())


def install() -> None:
    """Replace what ``torch.cuda`` answers, and how its work is ordered."""
    for step in (
        _install_queries,
        _install_streams,
        _install_memory,
        _install_random_states,
        _install_data_loader,
        _install_attention,
    ):
        step(torch.cuda)
