# SPDX-License-Identifier: Apache-2.0
"""A process with the CPU backend on: prints what it sees, as JSON, for the tests to judge.

Activation replaces parts of PyTorch for the whole process, so it must not happen in pytest's.
"""

import json
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ttrace import cpu

ORIGINAL_EMPTY = torch.empty


def devices() -> dict[str, Any]:
    """Every way to ask for a CUDA device, and the device that one gets."""
    x = torch.arange(6.0)
    asked = {
        "string": torch.zeros(2, device="cuda"),
        "indexed": torch.ones(2, device="cuda:1"),
        "object": torch.empty(2, device=torch.device("cuda", 0)),
        "number": torch.tensor([1.0], device=torch.cuda.current_device()),
        "like": torch.zeros_like(x, device="cuda"),
        "new": x.new_zeros(2, device="cuda"),
        "pinned": torch.tensor([1.0], pin_memory=True),
        "to string": x.to("cuda"),
        "to number": x.to(0),
        "to keyword": x.to(device="cuda", dtype=torch.float64),
        "cuda()": x.cuda(non_blocking=True),
        "module": torch.nn.Linear(2, 2).to("cuda").cuda(0).weight,
        "legacy": torch.cuda.FloatTensor([1.0]),
    }
    found = {name: str(tensor.device) for name, tensor in asked.items()}
    in_thread: list[str] = []
    thread = threading.Thread(
        target=lambda: in_thread.append(str(torch.zeros(1, device="cuda").device))
    )
    thread.start()
    thread.join()
    return {
        "asked": found,
        "thread": in_thread[0],
        "same tensor": x.cuda() is x,
        "dtype kept": str(x.to("cuda").dtype),
        "double": str(x.to(device="cuda", dtype=torch.float64).dtype),
        "meta": str(torch.zeros(2, device="meta").device),
    }


def mesh() -> str:
    """The device of a mesh of ranks; torch's FSDP2 takes its own from there."""
    return str(
        torch.distributed.device_mesh.DeviceMesh(
            "cuda", [0], _init_backend=False, _rank=0
        ).device_type
    )


def default_device() -> str:
    with torch.device("meta"):
        return str(torch.empty(2).device)


def scripted() -> list[float]:
    """TorchScript still finds the factories behind the wrappers."""

    def scale(x: torch.Tensor) -> torch.Tensor:
        return x + torch.ones([2])

    return torch.jit.script(scale)(torch.zeros(2)).tolist()


def type_names() -> dict[str, str]:
    """``tensor.type()`` as Megatron and as everyone else sees it."""
    asker: dict[str, Any] = {"__name__": "megatron.core.optimizer.optimizer"}
    exec("def ask(tensor): return tensor.type()", asker)
    x = torch.zeros(1)
    return {
        "megatron": asker["ask"](x),
        "megatron bf16": asker["ask"](x.bfloat16()),
        "others": x.type(),
    }


def streams() -> dict[str, Any]:
    side, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
    event.record()
    with torch.cuda.stream(side):
        side.wait_stream(torch.cuda.current_stream())
        side.wait_event(event)
        later = side.record_event()
    torch.cuda.synchronize()
    torch.zeros(1).record_stream(side)
    return {
        "done": side.query() and event.query(),
        "ordered": event.elapsed_time(later) >= 0,
        "capturing": torch.cuda.is_current_stream_capturing(),
    }


def random_states() -> dict[str, Any]:
    """The round trip that Megatron's tracker makes at every dropout."""
    torch.manual_seed(7)
    kept = torch.cuda.get_rng_state()
    first = torch.rand(3)
    torch.cuda.manual_seed(8)
    other = torch.rand(3)
    torch.cuda.default_generators[0].set_state(kept)
    again = torch.rand(3)
    torch.manual_seed(8)
    seeded = torch.rand(3)
    torch.manual_seed(8)
    list(torch.utils.data.DataLoader(torch.arange(3)))  # type: ignore[arg-type]
    after_reading = torch.rand(3)
    return {
        "kept by a data loader": torch.equal(after_reading, seeded),
        "restored": torch.equal(first, again),
        "another stream": not torch.equal(first, other),
        "same as the CPU's": torch.equal(other, seeded),
    }


def queries() -> dict[str, Any]:
    return {
        "available": torch.cuda.is_available(),
        "accelerator": torch.accelerator.is_available(),
        "allocated": torch.cuda.memory_allocated() + torch.cuda.memory_stats()["any"],
        "capability": list(torch.cuda.get_device_capability()),
        "memory": torch.cuda.get_device_properties(0).total_memory > 0,
        "still needed": cpu.needed(),
    }


def collectives(rank: int, where: str) -> dict[str, Any]:
    """What gloo refuses and the MoE dispatchers do; every value is the rank's number plus one."""
    dist.init_process_group(
        "nccl",
        init_method=f"file://{where}/store",
        rank=rank,
        world_size=2,
        device_id=torch.device("cuda", rank),
    )
    group = dist.new_group([0, 1], backend="nccl")
    mine = float(rank + 1)
    rows = [1, 3]
    gathered = [torch.zeros(n, 2) for n in rows]
    dist.all_gather(gathered, torch.full((rows[rank], 2), mine), group=group)
    parts = [torch.full((n,), mine) for n in rows]
    scattered = torch.zeros(rows[rank])
    dist.reduce_scatter(scattered, parts, group=group)
    splits = [torch.tensor([1, 2]), torch.tensor([1, 2])]
    wanted = torch.tensor([1, 1]) if rank == 0 else torch.tensor([2, 2])
    exchanged = torch.zeros(int(wanted.sum()))
    dist.all_to_all_single(exchanged, torch.full((3,), mine), wanted, splits[rank], group=group)
    halves = torch.zeros(1, dtype=torch.bfloat16)
    dist.reduce_scatter_tensor(halves, torch.full((2,), mine, dtype=torch.bfloat16), group=group)
    summed = [torch.full((2,), mine), torch.full((1,), mine)]
    with dist._coalescing_manager(group):
        for one in (*summed, torch.zeros(0), torch.zeros(0)):
            dist.all_reduce(one, group=group)
    try:
        with dist._coalescing_manager(group):
            for _ in range(2):
                dist.all_reduce(summed[0], group=group)
        refused = ""
    except RuntimeError as error:
        refused = str(error)
    alone = [dist.new_group([rank], backend="nccl") for rank in (0, 1)][rank]
    changed = torch.ones(2)
    with dist._coalescing_manager(alone, async_ops=True) as waiting:
        dist.reduce_scatter_tensor(changed, changed, group=alone, async_op=True)
    changed += 1
    waiting.wait()
    found = {
        "backend": dist.get_backend(group),
        "changed meanwhile": changed.tolist(),
        "coalesced": [one.tolist() for one in summed],
        "coalesced twice": refused,
        "all_gather": [part.flatten().tolist() for part in gathered],
        "reduce_scatter": scattered.tolist(),
        "inputs kept": [part.tolist() for part in parts],
        "all_to_all": exchanged.tolist(),
        "bf16": halves.tolist(),
    }
    dist.destroy_process_group()
    return found


def forked() -> list[dict[str, Any]]:
    """Ranks forked from this process, which has activated but holds no group and no thread."""
    threads = threading.active_count()
    with tempfile.TemporaryDirectory() as where:
        children = []
        for rank in range(2):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    found = collectives(rank, where) | {"parent's threads": threads}
                    (Path(where) / str(rank)).write_text(json.dumps(found), encoding="utf-8")
                    code = 0
                finally:
                    os._exit(code)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(codes):
            raise SystemExit(f"a forked rank failed: {codes}")
        return [json.loads((Path(where) / str(rank)).read_text()) for rank in range(2)]


def compiles() -> bool:
    """Whether an optimizer's methods and a dispatch mode import torch's compiler."""
    parameters = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    parameters.zero_grad()
    parameters.load_state_dict(parameters.state_dict())

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    with Mode():
        torch.ones(1)
    return "torch._dynamo" in sys.modules


def optimizer() -> bool:
    """A step, before which torch imports its compiler."""
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    torch.optim.SGD([parameter], lr=1.0).step()
    return parameter.item() == 0.0


def main() -> None:
    cpu.activate()
    cpu.activate()
    facts = {
        "wrapped once": torch.empty.__wrapped__ is ORIGINAL_EMPTY,  # type: ignore[attr-defined]
        "dynamo": os.environ["TORCHDYNAMO_DISABLE"],
        "compiled": [
            torch.compile(main) is main,
            torch.compile(main, mode="max-autotune") is main,
            torch.compile(dynamic=True)(main) is main,
            compiles(),
        ],
        "devices": devices(),
        "default device": default_device(),
        "mesh": mesh(),
        "scripted": scripted(),
        "types": type_names(),
        "streams": streams(),
        "random": random_states(),
        "queries": queries(),
        "forked": forked(),
        "optimizer": optimizer(),
    }
    json.dump(facts, sys.stdout)


if __name__ == "__main__":
    main()
