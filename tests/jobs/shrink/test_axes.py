# SPDX-License-Identifier: Apache-2.0
"""Axes of the large job become 2, and pairs of them are covered by jobs that fit."""

import itertools
import math
import re
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.jobs.shrink import axes
from megatron_ttrace.jobs.shrink.command_flags import CommandFlags
from megatron_ttrace.trace.errors import TTraceError

POWERS = st.sampled_from([1, 2, 4, 8])


def flags(tp=1, cp=1, pp=1, **more):
    """Arguments of a layout."""
    sizes = {"tensor-model": tp, "context": cp, "pipeline-model": pp}
    words = [
        word for axis, size in sizes.items() for word in (f"--{axis}-parallel-size", str(size))
    ]
    for name, value in more.items():
        words += [f"--{name.replace('_', '-')}", *str(value).split()]
    return CommandFlags.parse(words)


def test_all_axes_of_a_large_job():
    """Data parallelism is what remains."""
    large = axes.of_large(
        flags(8, 4, 8, num_layers=64, num_experts=64, expert_model_parallel_size=16), 8 * 4 * 8 * 16
    )
    assert (large.tp, large.cp, large.pp, large.ep, large.etp, large.dp) == (8, 4, 8, 16, 8, 16)
    assert large.edp == 4


@pytest.mark.parametrize(
    ("more", "chunks"),
    [
        ({"num_virtual_stages_per_pipeline_rank": 4}, 4),
        ({"num_layers_per_virtual_pipeline_stage": 2, "num_layers": 32}, 4),
        ({"pipeline_model_parallel_layout": "Et|(t|)*6L"}, 2),
        ({"hybrid_layer_pattern": "M|*|M|*/M"}, 1),
        ({}, 1),
    ],
)
def test_chunks(more, chunks):
    """Of a virtual pipeline, in whatever way they are given."""
    assert axes.of_large(flags(pp=4, **more), 4).chunks == chunks


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"pipeline_model_parallel_layout": "Et|(t|)*5L"},
            "-layout Et|(t|)*5L: 7 stages cannot be divided by 4 pipeline ranks",
        ),
        (
            {"pipeline_model_parallel_layout": "Et|(t|)*6L", "num_layers": 8},
            "-layout Et|(t|)*6L: 7 decoder layers, but --num-layers 8",
        ),
        ({"hybrid_layer_pattern": "M|*|M"}, "-pattern M|*|M: 3 stages cannot be divided by 4"),
    ],
)
def test_stages_that_megatron_refuses(more, message):
    """It would accept the smaller ones."""
    with pytest.raises(TTraceError, match=re.escape(message)):
        axes.of_large(flags(pp=4, **more), 4)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"num_attention_heads": 30}, "--num-attention-heads 30 cannot be divided by --tensor-"),
        (
            {"group_query_attention": "", "num_query_groups": 6},
            "--num-query-groups 6 cannot be divided by --tensor-",
        ),
        ({"num_query_groups": 6}, ""),
        (
            {"num_experts": 6, "expert_model_parallel_size": 4},
            "--num-experts 6 cannot be divided by --expert-model-parallel-size 4",
        ),
        ({"group_query_attention": "", "num_query_groups": 2}, ""),
    ],
)
def test_sizes_that_megatron_refuses(more, message):
    """The small job has others. Ranks may share a group of queries."""
    job = flags(4, **more)
    with pytest.raises(TTraceError, match=message) if message else nullcontext():
        axes.of_large(job, 16)


def test_ranks_that_are_too_few_are_taken_for_a_placeholder():
    """A script for one machine, to be changed by its user."""
    assert axes.of_large(flags(8, 1, 16), 8).dp == 1
    experts = flags(1, 1, 4, num_experts=8, expert_model_parallel_size=8)
    assert axes.of_large(experts, 8) == axes.Axes(pp=4, ep=8, dp=8)
    with pytest.raises(TTraceError, match="12 ranks cannot be divided into tensor 8"):
        axes.of_large(flags(8), 12)


@given(POWERS, POWERS, POWERS, POWERS)
def test_axes_become_two(tp, cp, pp, dp):
    """Those of 1 stay, and a pipeline keeps a stage in the middle."""
    job = flags(tp, cp, pp)
    large = axes.of_large(job, tp * cp * pp * dp)
    small = axes.of_small(job, large)
    sizes = [(name, getattr(large, name)) for name in large.spread()]
    assert small.spread() == large.spread()
    assert small.ranks == math.prod(min(3 if name == "pp" else 2, size) for name, size in sizes)


@given(POWERS, POWERS, POWERS, POWERS, POWERS, st.sampled_from([4, 8, 16]))
def test_pairs_are_covered(tp, cp, pp, dp, ep, most):
    """Every two axes of the large job are together in one small job that fits."""
    job = flags(tp, cp, pp, num_experts=8, expert_model_parallel_size=ep)
    large = axes.of_large(job, tp * cp * pp * dp * ep)
    small = axes.jobs(job, large, most)
    assert all(axes_.ranks <= most and axes_.edp for axes_ in small)
    for pair in itertools.combinations(large.spread(), 2):
        assert any(set(pair) <= set(axes_.spread()) for axes_ in small), pair
    assert min(3, pp) <= max(axes_.pp for axes_ in small) <= min(4, pp)
    assert max(axes_.cp for axes_ in small) == min(4, cp)


@given(POWERS, POWERS, POWERS, POWERS, POWERS, st.booleans(), st.sampled_from([8, 16]))
def test_sizes_that_differ(tp, cp, pp, dp, ep, whole, most):
    """Do so in a small job: code that takes one axis for another is not right in all of them."""
    etp = {"expert_tensor_parallel_size": 1} if whole else {}
    job = flags(tp, cp, pp, num_experts=8, expert_model_parallel_size=ep, **etp)
    large = axes.of_large(job, tp * cp * pp * dp * ep)
    small = axes.jobs(job, large, most)
    sizes = "tp", "cp", "ep", "dp", *(("etp", "edp") if ep > 1 else ())
    for one, other in itertools.combinations(sizes, 2):
        if getattr(large, one) != getattr(large, other):
            assert any(getattr(axes_, one) != getattr(axes_, other) for axes_ in small)


@given(st.sampled_from([3, 4, 8]), st.integers(2, 8), st.integers(1, 4))
def test_chunks_are_not_taken_for_stages(pp, chunks, dp):
    """Nor is the next chunk the previous one, or a rank in the middle of the pipeline missing."""
    job = flags(1, 1, pp, num_virtual_stages_per_pipeline_rank=chunks)
    large = axes.of_large(job, pp * dp)
    [small] = axes.jobs(job, large, 8)
    assert small.pp != small.chunks or pp == chunks
    assert small.pp >= 3
    assert min(small.chunks, 3) == min(chunks, 3)


@pytest.mark.parametrize("ep", [1, 8])
def test_not_only_experts_have_copies(ep):
    """Megatron's code for that may be wrong, and the large job does not run it."""
    job = flags(2, num_experts=8, expert_model_parallel_size=ep, expert_tensor_parallel_size=1)
    small = axes.jobs(job, axes.of_large(job, 32), 8)
    assert not any(axes_.copies_experts_only for axes_ in small)
    assert any(axes_.tp != axes_.dp for axes_ in small)


def test_what_does_not_fit():
    """Is named, with the number that it takes."""
    job = flags(2, 1, 2)
    with pytest.raises(
        TTraceError, match=r"--tensor-model-parallel-size with --pipeline.*fit 2"
    ) as error:
        axes.jobs(job, axes.of_large(job, 4), 2)
    assert "--max-ranks 4" in str(error.value)
    assert [error.ranks for error in axes.jobs(flags(8), axes.of_large(flags(8), 8), 2)] == [2]


def test_two_would_not_run_the_same_code():
    """Levels of context parallelism, copied groups, interleaving, optimizer instances."""
    for groups, tp in ((1, 2), (2, 4), (8, 2)):  # one group has no number that could be wrong
        grouped = flags(tp=8, group_query_attention="", num_query_groups=groups)
        assert axes.of_small(grouped, axes.of_large(grouped, 8)).tp == tp
    levels = flags(cp=8, hierarchical_context_parallel_sizes="2 4")
    assert axes.of_small(levels, axes.of_large(levels, 8)).cp == 4
    words = "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2"
    overlapped = CommandFlags.parse(words.split())
    not_overlapped = CommandFlags.parse([*words.split(), "--no-overlap-p2p-communication"])
    assert axes.of_small(overlapped, axes.of_large(overlapped, 4), stages=2).pp == 2
    assert axes.of_small(not_overlapped, axes.of_large(not_overlapped, 4), stages=2).pp == 3
    words = "--use-tp-pp-dp-mapping --expert-tensor-parallel-size 4"
    last = CommandFlags.parse([*words.split(), *"--tensor-model-parallel-size 2".split()])
    last = CommandFlags([*last.flags, *flags(2, 2, 2).flags])
    small = axes.of_small(last, axes.of_large(last, 8))
    assert (small.etp, small.edp, small.dp) == (4, 1, 1)
    instances = flags(num_distributed_optimizer_instances=4)
    assert axes.of_small(instances, axes.of_large(instances, 16)).dp == 4
    experts = {"expert_model_parallel_size": 4, "num_experts": 8}
    instances = flags(num_distributed_optimizer_instances=2, **experts)
    for ranks, copies in ((8, 2), (16, 4)):  # of an expert, in all instances
        assert axes.of_small(instances, axes.of_large(instances, ranks)).edp == copies


@given(POWERS, POWERS, POWERS, POWERS, POWERS)
def test_pipelines_before_data_parallelism(tp, cp, pp, ep, dp):
    """As many copies of experts as of all else, as Megatron asserts in that order of ranks."""
    ep = min(ep, tp * cp)
    layout = {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": tp * cp // ep}
    job = flags(tp, cp, pp, num_experts=8, use_tp_pp_dp_mapping="", **layout)
    large = axes.of_large(job, tp * cp * pp * dp)
    counts = range(len(large.spread()) + 1)
    subsets = (kept for count in counts for kept in itertools.combinations(large.spread(), count))
    for kept in (None, *subsets):
        small = axes.of_small(job, large, kept)
        assert small.edp == small.dp or small.pp == 1
        assert {*(large.spread() if kept is None else kept)} <= {*small.spread()}


def test_more_tensor_than_expert_parallelism():
    """A recipe of Megatron-LM's: its experts leave no smaller tensor parallelism."""
    layout = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2}
    job = flags(4, 1, 2, num_experts=4, use_tp_pp_dp_mapping="", **layout)
    small = axes.jobs(job, axes.of_large(job, 8), 8)
    assert small == [axes.Axes(tp=4, pp=2, ep=2, etp=2)]
    pair = axes.of_small(job, axes.of_large(job, 8), ("tp", "ep"))
    assert pair == axes.Axes(tp=2, ep=2, etp=2, dp=2)


def test_experts_divided_as_tensors_are():
    """Without a size of their own; then context and expert parallelism must be equal."""
    job = flags(4, 2, 2, num_experts=4, use_tp_pp_dp_mapping="", expert_model_parallel_size=2)
    large = axes.of_large(job, 32)
    assert axes.of_small(job, large) == axes.Axes(tp=2, cp=2, pp=2, ep=2, etp=2, dp=2)
    assert axes.of_small(job, large, ("cp", "pp")) == axes.Axes(cp=2, pp=2, ep=2)
    dense = flags(4, 1, 2, use_tp_pp_dp_mapping="")
    assert axes.of_small(dense, axes.of_large(dense, 16)) == axes.Axes(tp=2, pp=2, dp=2)


def test_copies_of_experts_stay():
    """Reducing the gradients of experts needs more than one copy of them."""
    job = flags(num_experts=8, expert_model_parallel_size=4)
    assert axes.of_small(job, axes.of_large(job, 4)).edp == 1
    assert axes.of_small(job, axes.of_large(job, 8)).edp == 2


@pytest.mark.parametrize(
    ("shards", "of_experts", "dp", "expected"),
    [
        (1, 1, 64, (1, 1, 2)),
        (8, 1, 8, (2, 1, 2)),
        (8, 8, 16, (2, 2, 4)),  # weights have copies
        (1, 4, 16, (1, 2, 2)),
        (8, 2, 16, (4, 2, 8)),  # unequal numbers stay unequal
        (2, 8, 16, (2, 4, 4)),
    ],
)
def test_ranks_that_gather_weights(shards, of_experts, dp, expected):
    """Two do, and as many more as have copies, or gather the weights of experts."""
    words = (
        f"--tensor-model-parallel-size 4 --tensor-parallel-num-weight-shards {4 * shards} "
        "--num-experts 8 --expert-tensor-parallel-size 1 --expert-model-parallel-size 4 "
        f"--expert-tensor-parallel-num-weight-shards {of_experts}"
    )
    flags = CommandFlags.parse(words.split())
    large = axes.of_large(flags, 4 * dp)
    assert (large.gtp, large.egtp) == (shards, of_experts)
    small = axes.of_small(flags, large)
    assert (small.gtp, small.egtp, small.dp) == expected
    assert small.dp % small.gtp == small.edp % small.egtp == 0
