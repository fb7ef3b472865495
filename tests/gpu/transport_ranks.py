# SPDX-License-Identifier: Apache-2.0
"""One rank over the staged transport: every collective; arguments: meeting place, rank, world."""

import sys

import torch
import torch.distributed as dist

from tests.gpu import transport


def main(rendezvous: str, rank: int, world: int) -> None:
    """Run each once and compare with what it must give."""
    transport.install(lambda tensor: True)
    dist.init_process_group("nccl", init_method=rendezvous, rank=rank, world_size=world)
    mine = torch.arange(4.0) + 10 * rank
    everyone = [torch.arange(4.0) + 10 * other for other in range(world)]
    total = sum(everyone)

    def same(found: object, expected: object) -> None:
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected)), (found, expected)

    data = mine.clone()
    handle = dist.all_reduce(data, async_op=True)
    handle.wait()
    same(data, total)
    data = mine.clone()
    dist.broadcast(data, 1)
    same(data, everyone[1])
    data = mine.clone()
    dist.reduce(data, 0)
    if rank == 0:
        same(data, total)
    parts = [torch.empty(4) for _ in range(world)]
    dist.all_gather(parts, mine)
    same(torch.stack(parts), torch.stack(everyone))
    # In place, as Megatron gathers parameters: the input is a part of the output.
    whole = torch.zeros(4 * world)
    whole[4 * rank : 4 * rank + 4] = mine
    dist.all_gather_into_tensor(whole, whole[4 * rank : 4 * rank + 4])
    same(whole, torch.cat(everyone))
    # In place, as Megatron reduces gradients: the output is a part of the input.
    whole = mine.repeat(world)
    shard = whole.view(world, 4)[rank]
    dist.reduce_scatter_tensor(shard, whole, op=dist.ReduceOp.SUM, async_op=True).wait()
    same(shard, total)
    out = torch.empty(4)
    dist.reduce_scatter(out, [mine.clone() for _ in range(world)])
    same(out, total)
    out = torch.empty(4)
    dist.all_to_all_single(out, mine)
    same(out, torch.cat([one.chunk(world)[rank] for one in everyone]))
    column = mine.clone().view(2, 2).t()  # not contiguous
    dist.all_reduce(column)
    same(column, total.view(2, 2).t())
    after, before = (rank + 1) % world, (rank - 1) % world
    received = torch.empty(1 << 20)
    sent = torch.full((1 << 20,), float(rank))
    requests = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, received, before)]
    )
    for request in requests:
        request.wait()
    same(received[-1], float(before))
    told = [None] * world
    dist.all_gather_object(told, rank)
    assert told == list(range(world))
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        a, b = mine.clone(), mine.clone()
        dist.all_reduce(a, async_op=True)
        dist.all_reduce(b, async_op=True)
    manager.wait()
    same(a + b, 2 * total)
    dist.barrier(device_ids=[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
