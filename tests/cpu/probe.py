# SPDX-License-Identifier: Apache-2.0
"""Each substitution of the CPU backend, in a process in which it is active.

Prints why each check failed, as JSON. Activation replaces parts of PyTorch for the whole process,
so it must not happen in pytest's.
"""

import json
import os
import sys
import tempfile
import threading
import traceback
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ttrace import cpu
from tests.cpu.te.ranks import fork

ORIGINAL_EMPTY = torch.empty


def devices() -> None:
    """Only the place of a tensor changes, whatever way one asks for a CUDA device."""
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
        "legacy bool": torch.cuda.BoolTensor([True]),
        "drawn": torch.normal(0.0, 1.0, (2,), device="cuda", generator=torch.Generator("cuda")),
    }
    with torch.device("cuda"):
        asked["context"] = torch.zeros(2)
    with torch.device(torch.cuda.current_device()):
        asked["context by number"] = torch.nn.Linear(2, 2).weight
    torch.set_default_device("cuda")
    asked["default"] = torch.arange(2)
    torch.set_default_device(None)
    assert {name: str(tensor.device) for name, tensor in asked.items()} == dict.fromkeys(
        asked, "cpu"
    )
    assert isinstance(torch.default_generator, torch.Generator)
    assert x.cuda() is x
    assert x.to("cuda").dtype == torch.float32
    assert asked["to keyword"].dtype == torch.float64
    assert torch.zeros(2, device="meta").is_meta


def threads() -> None:
    """Checkpoints are written, and data sets built, by other threads."""
    made: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: made.append(torch.zeros(1, device="cuda")))
    thread.start()
    thread.join()
    assert made[0].device.type == "cpu"


def mesh() -> None:
    """The device of a mesh of ranks; torch's FSDP2 takes its own from there."""
    ranks = torch.distributed.device_mesh.DeviceMesh("cuda", [0], _init_backend=False, _rank=0)
    assert ranks.device_type == "cpu"


def default_device() -> None:
    """``--init-model-with-meta-device`` builds the model under one."""
    with torch.device("meta"):
        assert torch.empty(2).is_meta


def scripted() -> None:
    """TorchScript still finds the factories behind the wrappers."""

    def scale(x: torch.Tensor) -> torch.Tensor:
        return x + torch.ones([2])

    assert torch.jit.script(scale)(torch.zeros(2)).tolist() == [1.0, 1.0]


def type_names() -> None:
    """Only Megatron sees CUDA types in ``tensor.type()``."""
    asker: dict[str, Any] = {"__name__": "megatron.core.optimizer.optimizer"}
    exec("def ask(tensor): return tensor.type()", asker)
    x = torch.zeros(1)
    assert asker["ask"](x) == "torch.cuda.FloatTensor"
    assert asker["ask"](x.bfloat16()) == "torch.cuda.BFloat16Tensor"
    assert x.type() == "torch.FloatTensor"


def streams() -> None:
    """All work has been done, in its order."""
    side, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
    event.record()
    with torch.cuda.stream(side):
        side.wait_stream(torch.cuda.current_stream())
        side.wait_event(event)
        later = side.record_event()
    torch.cuda.synchronize()
    torch.zeros(1).record_stream(side)
    assert side.query()
    assert event.query()
    assert event.elapsed_time(later) >= 0
    assert not torch.cuda.is_current_stream_capturing()

    @torch.cuda.nvtx.range("step {}", 1)
    def marked() -> bool:
        return True

    assert marked()


def random_states() -> None:
    """The round trip that Megatron's tracker makes at every dropout, with one generator."""
    torch.manual_seed(7)
    kept = torch.cuda.get_rng_state()
    first = torch.rand(3)
    torch.cuda.manual_seed(8)
    other = torch.rand(3)
    torch.cuda.default_generators[0].set_state(kept)
    assert torch.equal(torch.rand(3), first)
    assert not torch.equal(other, first)
    torch.manual_seed(8)
    assert torch.equal(torch.rand(3), other)


def data_loader() -> None:
    """Its seed, drawn on one rank only, would part the dropout masks of the others."""
    torch.manual_seed(8)
    seeded = torch.rand(3)
    torch.manual_seed(8)
    list(torch.utils.data.DataLoader(torch.arange(3)))  # type: ignore[arg-type]
    assert torch.equal(torch.rand(3), seeded)


def queries() -> None:
    """Megatron finds a device, and the data loader none; the backend is needed still."""
    assert torch.cuda.is_available()
    assert cpu.needed()
    assert not torch.accelerator.is_available()
    torch.cuda.set_device("cuda:1")
    with torch.cuda.device(0), torch.cuda.device(-1), torch.cuda.device(None):
        assert torch.cuda.current_device() == 0
    assert torch.cuda.current_device() == 1
    torch.cuda.set_device(0)
    torch.accelerator.set_device_index(0)
    assert torch.accelerator.current_device_index() == 0
    torch.cuda.set_per_process_memory_fraction(0.5)
    assert torch.cuda.memory_allocated() + torch.cuda.memory_stats()["any"] == 0
    assert torch.cuda.get_device_properties(0).total_memory > 0
    assert torch.cuda.get_device_capability() >= (8, 0)  # bf16 is refused below


def autocast() -> None:
    """CUDA's rules act on the CPU's tensors, in the region that asks for them and nowhere else."""
    linear, x = torch.nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
    low, wide = torch.bfloat16, torch.float32

    class Function(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=wide)
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x @ x.T

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient

    with torch.autocast("cuda", dtype=low):
        y = linear(x)
        found = [y, y.T @ x, torch.mv(y, x[0]), y + x, y.softmax(-1), y.sum(), y.exp(), y.norm()]
        found += [torch.dot(y[0], x[0]), torch.dot(y[0], y[0]), Function.apply(y)]
        found += [torch.nn.functional.layer_norm(y, (4,)), y.double().exp()]
        with torch.autocast("cuda", enabled=False):
            found.append(linear(x))
        assert torch.is_autocast_enabled()
    rest = [wide, wide, wide, wide, wide, wide, low, wide, wide, torch.float64, wide]
    assert [tensor.dtype for tensor in found] == [low, low, low, *rest]
    with torch.autocast(x.device.type):
        with torch.autocast("cuda", enabled=False):
            assert linear(x).dtype == wide
        assert linear(x).dtype == torch.float16
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == linear(x).dtype == wide
    assert y.softmax(-1).dtype == low
    with torch.cuda.amp.autocast():
        assert linear(x).dtype == torch.float16


def collectives(rank: int, where: str) -> None:
    """What gloo refuses and the MoE dispatchers do; every value is the rank's number plus one."""
    dist.init_process_group(
        "nccl",
        init_method=f"file://{where}/store",
        rank=rank,
        world_size=2,
        device_id=torch.device("cuda", rank),
    )
    group = dist.new_group([0, 1], backend="nccl")
    assert dist.get_backend(group) == "gloo"
    mine = float(rank + 1)
    rows = [1, 3]
    gathered = [torch.zeros(n, 2) for n in rows]
    dist.all_gather(gathered, torch.full((rows[rank], 2), mine), group=group)
    assert [part.flatten().tolist() for part in gathered] == [[1.0, 1.0], [2.0] * 6]
    parts = [torch.full((n,), mine) for n in rows]
    scattered = torch.zeros(rows[rank])
    dist.reduce_scatter(scattered, parts, group=group)
    assert scattered.tolist() == [3.0] * rows[rank]
    # Gloo's own reduce writes partial sums into the buffers of the other ranks.
    assert [part.tolist() for part in parts] == [[mine] * n for n in rows]
    wanted = torch.tensor([1, 1]) if rank == 0 else torch.tensor([2, 2])
    exchanged = torch.zeros(int(wanted.sum()))
    splits = torch.tensor([1, 2])
    dist.all_to_all_single(exchanged, torch.full((3,), mine), wanted, splits, group=group)
    assert exchanged.tolist() == ([1.0, 2.0] if rank == 0 else [1.0, 1.0, 2.0, 2.0])
    received = [torch.zeros(1, rank + 1) for _ in range(2)]
    dist.all_to_all(received, [torch.full((1, n), mine) for n in (1, 2)], group=group)
    assert [part.tolist() for part in received] == [[[n] * (rank + 1)] for n in (1.0, 2.0)]
    halves = torch.zeros(1, dtype=torch.bfloat16)
    dist.reduce_scatter_tensor(halves, torch.full((2,), mine, dtype=torch.bfloat16), group=group)
    assert halves.tolist() == [3.0]
    coalesced(group, rank, mine)
    dist.destroy_process_group()


def coalesced(group: Any, rank: int, mine: float) -> None:
    """Reductions at once; two of one buffer are refused, and a rank alone changes nothing late."""
    summed = [torch.full((2,), mine), torch.full((1,), mine)]
    with dist._coalescing_manager(group):
        for one in (*summed, torch.zeros(0), torch.zeros(0)):
            dist.all_reduce(one, group=group)
    assert [one.tolist() for one in summed] == [[3.0, 3.0], [3.0]]
    refused = ""
    try:
        with dist._coalescing_manager(group):
            for _ in range(2):
                dist.all_reduce(summed[0], group=group)
    except RuntimeError as error:
        refused = str(error)
    assert "undefined with NCCL" in refused
    alone = [dist.new_group([rank], backend="nccl") for rank in (0, 1)][rank]
    changed = torch.ones(2)
    with dist._coalescing_manager(alone, async_ops=True) as waiting:
        dist.reduce_scatter_tensor(changed, changed, group=alone, async_op=True)
    changed += 1
    waiting.wait()
    assert changed.tolist() == [2.0, 2.0]


def forked() -> None:
    """Ranks forked from this process, which has activated but holds no group and no thread."""
    assert threading.active_count() == 1
    with tempfile.TemporaryDirectory() as where:
        fork(2, lambda rank: collectives(rank, where))


def compiled() -> None:
    """``torch.compile`` returns functions as they are, and nothing imports the compiler."""
    assert os.environ["TORCHDYNAMO_DISABLE"] == "1"
    assert torch.compile(main) is main
    assert torch.compile(main, mode="max-autotune") is main
    assert torch.compile(model=main) is main
    assert torch.compile(dynamic=True)(main) is main
    parameters = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    parameters.zero_grad()
    parameters.load_state_dict(parameters.state_dict())

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    with Mode():
        torch.ones(1)
    assert "torch._dynamo" not in sys.modules


def attention() -> None:
    """Kernels of a GPU can be asked for, and FlexAttention, which is compiled, has gradients."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    x = torch.randn(1, 2, 8, 4, requires_grad=True)
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        expected = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 8, 8, device="cuda")
    found = torch.compile(flex_attention)(x, x, x, block_mask=mask)
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert torch.equal(torch.compile(flex_attention)(x, x, x, block_mask=mask), found)
    assert torch.cuda.make_graphed_callables(found, (x,)) is found


def optimizer() -> None:
    """Before its step torch imports its compiler, which wants each function of torch.cuda once."""
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    torch.optim.SGD([parameter], lr=1.0).step()
    assert parameter.item() == 0.0


def twice() -> None:
    """Activating twice wraps once."""
    assert torch.empty.__wrapped__ is ORIGINAL_EMPTY  # type: ignore[attr-defined]


CHECKS = {
    check.__name__: check
    for check in (
        *(compiled, twice, devices, threads, mesh, default_device, scripted, type_names, streams),
        *(random_states, data_loader, queries, forked, optimizer, autocast, attention),
    )
}
"""In this order: scripting, and an optimizer's step, import the compiler."""


def main() -> None:
    """Run all checks."""
    cpu.activate()
    cpu.activate()
    failures = {}
    for name, check in CHECKS.items():
        try:
            check()
        except Exception:  # noqa: BLE001 - the test reports it
            failures[name] = traceback.format_exc()
    json.dump(failures, sys.stdout)


if __name__ == "__main__":
    main()
