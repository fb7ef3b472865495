# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: two ranks with half the sequence each against one with all of it."""

import pytest
import torch
import torch.distributed as dist

from megatron_ttrace.cpu.te.attention import DotProductAttention
from megatron_ttrace.cpu.te.context_parallel import thd_get_partitioned_indices, zigzag
from tests.cpu.te.ranks import close, run_ranks

SEQ, BATCH, HEADS, GROUPS, DIM = 16, 2, 8, 4, 3


def whole_inputs(shape_head=(SEQ, BATCH), value_dim=DIM):
    torch.manual_seed(11)
    shapes = ((HEADS, DIM), (GROUPS, DIM), (GROUPS, value_dim))
    return [torch.randn(*shape_head, *shape, dtype=torch.float64) for shape in shapes]


def attention(**kwargs):
    made = DotProductAttention(HEADS, DIM, num_gqa_groups=GROUPS, **kwargs)
    if made.softmax_type == "learnable":
        with torch.no_grad():
            made.softmax_offset.copy_(torch.linspace(-1, 1, HEADS))
    return made


def check(rank, size, groups, comm, mine=None, call=None, value_dim=DIM, **kwargs):
    packed = call is not None
    tensors = whole_inputs((SEQ,) if packed else (SEQ, BATCH), value_dim)
    mine = zigzag(SEQ, size, rank) if mine is None else mine
    call = call or {}
    whole = [t.clone().requires_grad_() for t in tensors]
    one = attention(**kwargs)
    expected = one(*whole, **call)
    torch.manual_seed(12)
    grad = torch.randn_like(expected)
    expected.backward(grad)

    part = [t[mine].clone().requires_grad_() for t in tensors]
    many = attention(cp_group=groups, cp_comm_type=comm, **kwargs)
    output = many(*part, **call)
    output.backward(grad[mine])
    close(output, expected[mine])
    for ours, theirs in zip(part, whole, strict=True):
        close(ours.grad, theirs.grad[mine])
    if kwargs.get("softmax_type") == "learnable":
        dist.all_reduce(many.softmax_offset.grad)
        close(many.softmax_offset.grad, one.softmax_offset.grad, 1e-5)


def check_two(rank):
    group = dist.group.WORLD
    for comm in ("p2p", "all_gather", "a2a"):
        for mask in ("causal", "no_mask"):
            check(rank, 2, group, comm, attn_mask_type=mask)
        check(rank, 2, group, comm, value_dim=5)
        starts = torch.tensor([0, 4, 16], dtype=torch.int32)
        call = {
            "qkv_format": "thd",
            "cu_seqlens_q": starts,
            "cu_seqlens_kv": starts,
            "attn_mask_type": "padding_causal",
        }
        mine = thd_get_partitioned_indices(starts, SEQ, 2, rank).long()
        if comm == "all_gather":
            with pytest.raises(ValueError, match="does not support packed"):
                check(rank, 2, group, comm, mine, call)
        else:
            check(rank, 2, group, comm, mine, call)
    check(rank, 2, group, "a2a", mine, call, softmax_type="off-by-one")
    for comm in ("all_gather", "a2a"):
        check(rank, 2, group, comm, window_size=(5, 0))
    check(rank, 2, group, "a2a", softmax_type="learnable")
    for comm, kwargs in (
        ("p2p", {"window_size": (5, 0)}),
        ("p2p", {"softmax_type": "learnable"}),
        ("all_gather", {"softmax_type": "off-by-one"}),
    ):
        with pytest.raises(ValueError, match="does not support"):
            check(rank, 2, group, comm, **kwargs)


def check_four(rank):
    """Ranks 0, 1 and 2, 3 exchange heads; 0, 2 and 1, 3 form rings."""
    inner = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    ring = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    check(rank, 4, [inner, ring], "a2a+p2p")
    starts = torch.tensor([0, 16], dtype=torch.int32)
    packed = {"qkv_format": "thd", "cu_seqlens_q": starts, "cu_seqlens_kv": starts}
    with pytest.raises(ValueError, match="does not support packed"):
        check(rank, 4, [inner, ring], "a2a+p2p", call=packed)
    check(rank, 4, dist.group.WORLD, "p2p")
    check(rank, 4, dist.group.WORLD, "p2p", attn_mask_type="no_mask")


def test_two_ranks_compute_what_one_does():
    run_ranks(2, check_two)


def test_four_ranks_in_a_ring_and_in_a_hierarchy():
    run_ranks(4, check_four)


def test_zigzag_gives_each_rank_an_early_and_a_late_chunk():
    assert zigzag(8, 2, 0).tolist() == [0, 1, 6, 7]
    assert zigzag(8, 2, 1).tolist() == [2, 3, 4, 5]
    starts = torch.tensor([0, 4, 12])
    assert thd_get_partitioned_indices(starts, 12, 2, 0).tolist() == [0, 3, 4, 5, 10, 11]
