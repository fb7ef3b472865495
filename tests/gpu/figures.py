# SPDX-License-Identifier: Apache-2.0
"""Numbers of the fused kernel, and of traced steps, on the device that is there."""

import dataclasses
import itertools
import json
import math
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_ttrace.compare import device
from megatron_ttrace.compare.measure import Sums, measure
from megatron_ttrace.jobs.processes.child import free_port
from megatron_ttrace.placement.mesh import SINGLE
from megatron_ttrace.placement.plan import plan
from megatron_ttrace.trace.checksum import MASK, weighted
from megatron_ttrace.trace.staging import to_device

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
_COMMON = (
    "--num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 "
    "--micro-batch-size 1 --global-batch-size 1 --train-iters 6 --lr 1e-4 --lr-warmup-iters 0 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 50000 --eval-iters 0 "
    "--attention-dropout 0 --hidden-dropout 0 --log-interval 1 "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm"
)
MODELS = {
    "0.3B": f"--num-layers 24 --hidden-size 1024 {_COMMON}".split(),
    "1B": f"--num-layers 16 --hidden-size 2048 {_COMMON}".split(),
}


def one_process() -> dict[str, str]:
    """The environment of a job of one rank."""
    return {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }


def _tensors(
    size: int, c_type: torch.dtype, r_type: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    r = torch.randn(size, generator=generator)
    c = r * (1 + 0.1 * torch.randn(size, generator=generator))
    if size > 8:
        c[:3] = torch.tensor([math.nan, math.nan, 1.0])
        r[:3] = torch.tensor([math.nan, 1.0, math.nan])
    return c.to(c_type), r.to(r_type)


def agreement(where: str, dtypes: Sequence[torch.dtype] = DTYPES) -> dict[str, Any]:
    """Compare the device's sums with the CPU's for all pairs of dtypes."""
    worst = 0.0
    for c_type, r_type in itertools.product(dtypes, dtypes):
        for size in (1, 7, 16_384, 300_007):
            c, r = _tensors(size, c_type, r_type)
            boxes = plan((size,), (), SINGLE)
            marks = int(weighted(c)) & MASK
            expected = dataclasses.replace(measure(c, r, boxes, 3.0), checksum=marks)
            rows = device.launch(c.to(where), r, boxes, 3.0)
            found = device.read(rows.cpu().tolist(), boxes)
            for field in dataclasses.fields(Sums):
                ours, theirs = getattr(found, field.name), getattr(expected, field.name)
                told = f"{field.name} of {size} {c_type}, {r_type}: {ours}, not {theirs}"
                if isinstance(ours, int):
                    assert ours == theirs, told
                else:
                    scale = max(abs(theirs), expected.candidate if field.name == "dot" else 0.0)
                    error = abs(ours - theirs) / scale if scale else abs(ours)
                    assert error < 1e-12, told
                    worst = max(worst, error)
    return {"pairs": len(dtypes) ** 2, "largest_relative_difference": worst}


def _seconds(work: Callable[[], Any], where: str, times: int) -> float:
    """Median time of one call."""
    found = []
    for _ in range(times):
        if where == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        if where == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return sorted(found)[times // 2]


def kernel_speed(where: str) -> dict[str, Any]:
    """GB/s of the comparison and of a copy on the device, for candidates that are there already."""
    size, times = (1 << 28, 20) if where == "cuda" else (1 << 18, 2)
    told: dict[str, Any] = {}
    for dtype in (torch.bfloat16, torch.float32):
        c = torch.randn(size, device=where).to(dtype)
        r, target = c.clone(), torch.empty_like(c)
        boxes = plan((size,), (), SINGLE)
        device.launch(c, r, boxes)  # compiles
        compared = _seconds(lambda: device.launch(c, r, boxes), where, times)  # noqa: B023
        copied = _seconds(lambda: target.copy_(c), where, times)  # noqa: B023
        moved = 2 * c.nbytes / 1e9
        host = r.cpu()
        staged = _seconds(lambda: to_device(host, c.device), where, 3)  # noqa: B023
        told[str(dtype)] = {
            "compare_gb_per_s": moved / compared,
            "copy_gb_per_s": moved / copied,
            "time_over_floor": compared / copied,
            "reference_to_device_gb_per_s": host.nbytes / 1e9 / staged if where == "cuda" else None,
        }
    return told


def of_log(text: str) -> dict[str, Any]:
    """Milliseconds of each iteration, and the peak of memory, from a training run's output."""
    steps = [float(ms) for ms in re.findall(r"elapsed time per iteration \(ms\): ([0-9.]+)", text)]
    memory = re.search(r"^test memory: (.*)$", text, re.MULTILINE)
    return {"milliseconds": steps, "memory": json.loads(memory[1]) if memory else None}


if __name__ == "__main__":
    assert sys.argv[1:] == ["agreement"]
    print(json.dumps(agreement("cuda", (torch.bfloat16, torch.float32))))
