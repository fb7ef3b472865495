# SPDX-License-Identifier: Apache-2.0
"""Each row of the table: the release before does not behave so, the release itself does."""

import inspect
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_ttrace.cpu.te import offering, releases
from megatron_ttrace.cpu.te.attention import DotProductAttention
from megatron_ttrace.cpu.te.context_parallel import partitioned_indices
from megatron_ttrace.cpu.te.cross_entropy import parallel_cross_entropy
from megatron_ttrace.cpu.te.differences import (
    DIFFERENCES,
    Argument,
    Change,
    Name,
    as_released,
    offers,
    takes,
)
from megatron_ttrace.cpu.te.fp8_state import fp8_autocast
from megatron_ttrace.cpu.te.grouped_linear import GroupedLinear
from megatron_ttrace.cpu.te.linear import Linear
from megatron_ttrace.cpu.te.permutation import moe_permute
from megatron_ttrace.cpu.te.recipes import Float8BlockScaling, Float8CurrentScaling
from megatron_ttrace.cpu.te.releases import KNOWN, Release
from megatron_ttrace.cpu.te.router import (
    fused_compute_score_for_moe_aux_loss,
    fused_topk_with_score_function,
)
from megatron_ttrace.errors import TTraceError
from tests.cpu.te.ranks import run_ranks

HALF_STEP = 2.0**-8  # of bfloat16, relative


@contextmanager
def emulating(release):
    before = releases.current()
    releases.use(release)
    try:
        yield
    finally:
        releases.use(before)


def the_one_before(release):
    return max(known for known in KNOWN if known < release)


def offered():
    """Every class and function that is offered, by name."""
    found = {}
    for homes in offering._OFFERED.values():
        for home, words in homes.items():
            module = __import__(f"megatron_ttrace.cpu.te.{home}", fromlist=["x"])
            found |= {word: getattr(module, word) for word in words.split()}
    return found


def cross_entropy_gradient(dtype, weights, **more):
    """Of losses weighted by token, from TransformerEngine's function and exactly."""
    torch.manual_seed(1)
    logits = torch.randn(len(weights), 1, 8, dtype=torch.float64).to(dtype)
    target = torch.arange(len(weights))[:, None] % 8
    weights = torch.tensor(weights, dtype=torch.float64)[:, None]
    ours, theirs = logits.clone().requires_grad_(), logits.double().requires_grad_()
    loss = parallel_cross_entropy(ours, target, **more)
    (loss * weights.to(loss.dtype)).sum().backward()
    exact = F.cross_entropy(theirs.flatten(0, 1), target.flatten(), reduction="none")
    (exact[:, None] * weights).sum().backward()
    return ours.grad.double(), theirs.grad


def is_rounded_once(actual, exact):
    return bool(((actual - exact).abs() <= 1.01 * HALF_STEP * exact.abs()).all())


def cross_entropy_unscaled():
    ours, exact = cross_entropy_gradient(torch.float64, [1.0, 1.0, 1.0])
    return torch.allclose(ours, exact)


def cross_entropy_by_row():
    ours, exact = cross_entropy_gradient(torch.float64, [0.5, 0.0, 2.0])
    return torch.allclose(ours, exact)


def cross_entropy_in_float32():
    weights = [0.3 + index / 7 for index in range(40)]
    return is_rounded_once(*cross_entropy_gradient(torch.bfloat16, weights))


def cross_entropy_mean_of_counted():
    logits, target = torch.randn(3, 1, 8).double(), torch.tensor([[1], [-100], [2]])
    loss = parallel_cross_entropy(logits, target, reduce_loss=True)
    return torch.allclose(loss, F.cross_entropy(logits[:, 0], target[:, 0]))


def router_in_float32():
    torch.manual_seed(0)
    logits = torch.randn(30, 8).bfloat16()
    _, scores = fused_compute_score_for_moe_aux_loss(logits, 2, "sigmoid")
    weights, chosen = fused_topk_with_score_function(
        logits, 2, False, None, None, None, "sigmoid", None
    )
    kept = torch.sigmoid(logits.double()) * chosen
    once = is_rounded_once(weights.double(), kept / kept.sum(-1, keepdim=True))
    assert once == (scores.dtype == torch.float32)
    return once


def router_sqrtsoftplus():
    try:
        fused_compute_score_for_moe_aux_loss(torch.randn(2, 4), 2, "sqrtsoftplus")
    except ValueError:
        return False
    return True


def router_top1_normalised():
    _, scores = fused_compute_score_for_moe_aux_loss(torch.randn(3, 4), 1, "sigmoid")
    return torch.allclose(scores.sum(-1), torch.ones(3))


def grouped_unmarked():
    layers = [GroupedLinear(1, 2, 2, parallel_mode=mode) for mode in (None, "column", "row")]
    marks = {hasattr(p, "partition_dim") for layer in layers for p in [layer.weight0]}
    assert len(marks) == 1
    return not marks.pop()


def grouped_single_by_variable():
    try:
        GroupedLinear(2, 2, 2, single_grouped_weight=True)
    except TTraceError:
        return False
    return True


def sinks_start_at_zero():
    # With deterministic algorithms PyTorch fills new memory with NaN.
    torch.use_deterministic_algorithms(True)
    try:
        sinks = DotProductAttention(2, 4, softmax_type="learnable").softmax_offset
    finally:
        torch.use_deterministic_algorithms(False)
    assert sinks.isnan().all() or (sinks == 0).all()
    return not sinks.isnan().any()


def permute_needs_rows():
    try:
        moe_permute(torch.randn(3, 2), torch.zeros(3, 4, dtype=torch.bool), num_out_tokens=0)
    except AssertionError:
        return True
    return False


def with_context_parallelism(*, comm, value=4, packed=False, **more):
    """Whether two ranks can run this attention."""

    def is_taken():
        group = dist.group.WORLD
        attention = DotProductAttention(2, 4, cp_group=group, cp_comm_type=comm, **more)
        starts = torch.tensor([0, 4, 8], dtype=torch.int32)
        call = {"qkv_format": "thd", "cu_seqlens_q": starts, "cu_seqlens_kv": starts}
        rows = partitioned_indices(starts, 8, 2, dist.get_rank()).long()
        shape = (8,) if packed else (8, 1)
        inputs = [torch.randn(*shape, 2, size)[rows] for size in (4, 4, value)]
        try:
            attention(*inputs, **(call if packed else {}))
        except ValueError:
            return False
        return True

    return is_taken


def fp8_gathers_small_parts():
    group = dist.group.WORLD
    layer = Linear(
        64, 64, parallel_mode="column", tp_group=group, tp_size=2, sequence_parallel=True
    )
    try:
        with fp8_autocast(fp8_recipe=Float8BlockScaling()):
            layer(torch.randn(16, 64))
    except ValueError:
        return False
    return True


ALONE = {
    Change.CROSS_ENTROPY_UNSCALED: cross_entropy_unscaled,
    Change.CROSS_ENTROPY_BY_ROW: cross_entropy_by_row,
    Change.CROSS_ENTROPY_MEAN_OF_COUNTED: cross_entropy_mean_of_counted,
    Change.CROSS_ENTROPY_IN_FLOAT32: cross_entropy_in_float32,
    Change.ROUTER_IN_FLOAT32: router_in_float32,
    Change.ROUTER_SQRTSOFTPLUS: router_sqrtsoftplus,
    Change.ROUTER_TOP1_NORMALISED: router_top1_normalised,
    Change.GROUPED_UNMARKED: grouped_unmarked,
    Change.GROUPED_SINGLE_BY_VARIABLE: grouped_single_by_variable,
    Change.SINKS_START_AT_ZERO: sinks_start_at_zero,
    Change.PERMUTE_NEEDS_ROWS: permute_needs_rows,
}

ON_TWO_RANKS = {
    Change.FP8_GATHERS_SMALL_PARTS: fp8_gathers_small_parts,
    Change.CONTEXT_PARALLEL_MLA_RING: with_context_parallelism(comm="p2p", value=6),
    Change.CONTEXT_PARALLEL_MLA: with_context_parallelism(comm="all_gather", value=6),
    Change.PACKED_ALL_TO_ALL: with_context_parallelism(comm="a2a", packed=True),
    Change.PACKED_LARGEST_LOGIT: with_context_parallelism(
        comm="p2p", packed=True, return_max_logit=True
    ),
    Change.PACKED_SINKS: with_context_parallelism(
        comm="a2a", packed=True, softmax_type="off-by-one"
    ),
    Change.PACKED_ALL_GATHER: with_context_parallelism(comm="all_gather", packed=True),
}


def rows(kind):
    """The table's rows of one kind, as parameters with a name."""
    return [
        pytest.param(row, id=f"{row.release}-{getattr(row.what, 'name', row.what)}")
        for row in DIFFERENCES
        if isinstance(row.what, kind)
    ]


def observed(row, seen):
    """Whether the behaviour is seen in the release before, in the release and in the newest."""
    answers = []
    for release in (the_one_before(row.release), row.release, KNOWN[-1]):
        with emulating(release):
            answers.append(seen())
    return answers


def test_every_behaviour_is_observed():
    assert {*ALONE, *ON_TWO_RANKS} == {*Change}
    listed = [row.what for row in DIFFERENCES if isinstance(row.what, Change)]
    assert sorted(listed, key=str) == sorted(Change, key=str)
    assert len({row.what for row in DIFFERENCES}) == len(DIFFERENCES)


@pytest.mark.parametrize("row", [p for p in rows(Change) if p.values[0].what in ALONE])
def test_behaviour(row):
    assert observed(row, ALONE[row.what]) == [False, True, True]


def check_two(rank):
    for row in DIFFERENCES:
        if row.what in ON_TWO_RANKS:
            seen = observed(row, ON_TWO_RANKS[row.what])
            assert seen == [False, True, True], row.what


def test_behaviour_on_two_ranks():
    run_ranks(2, check_two)


@pytest.mark.parametrize("row", rows(Argument))
def test_argument(row):
    """In the signature, which Megatron reads, and in a call."""
    owner, _, method = row.what.function.partition(".")
    thing = offered()[owner]

    def seen():
        released = as_released(thing)
        called = getattr(released, method or "__init__") if inspect.isclass(released) else released
        parameters = inspect.signature(called).parameters
        known = row.what.name in parameters
        assert known == takes(row.what.function, row.what.name)
        if not known:
            needed = [name for name, value in parameters.items() if value.default is value.empty]
            with pytest.raises(TypeError, match=row.what.name):
                called(**dict.fromkeys([*needed, row.what.name]))
        return known

    assert observed(row, seen) == [False, True, True]


@pytest.mark.parametrize("row", rows(Name))
def test_name(row):
    homes = offering._OFFERED[f"transformer_engine.{row.what.module}"]
    assert any(row.what.name in words.split() for words in homes.values())
    assert observed(row, lambda: offers(row.what.module, row.what.name)) == [False, True, True]


def test_older_class_is_the_class_without_the_argument():
    with emulating(Release(2, 13)):
        older = as_released(GroupedLinear)
        assert issubclass(older, GroupedLinear)
        layer = older(2, 3, 4, bias=False)
        assert layer(torch.randn(5, 3), [2, 3]).shape == (5, 4)
        with pytest.raises(TypeError, match="single_grouped_weight"):
            older(2, 3, 4, single_grouped_weight=False)
    with emulating(Release(2, 18)):
        assert as_released(GroupedLinear) is GroupedLinear


@pytest.mark.parametrize(
    ("release", "variable", "marked"),
    [
        (Release(2, 13), "NVTE_ALLOC_CONTIGUOUS_GROUPED_LINEAR_WEIGHTS", True),
        (Release(2, 14), "NVTE_ALLOC_CONTIGUOUS_GROUPED_LINEAR_WEIGHTS", False),
    ],
)
def test_contiguous_weights_are_marked_in_one_release(monkeypatch, release, variable, marked):
    monkeypatch.setenv(variable, "1")
    with emulating(release):
        assert hasattr(GroupedLinear(1, 2, 2).weight0, "partition_dim") is marked


def test_single_weight_is_refused_where_it_would_be_made(monkeypatch):
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    with pytest.raises(TTraceError, match="moe-single-grouped-weight"):
        GroupedLinear(2, 2, 2, single_grouped_weight=True)


def test_option_of_a_recipe_that_is_not_implemented(monkeypatch):
    """Refused, not passed over, where the release has it."""
    monkeypatch.setenv("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", "1")
    with pytest.raises(NotImplementedError, match="use_power_2_scales"):
        Float8CurrentScaling()
    with emulating(Release(2, 7)):
        Float8CurrentScaling()
