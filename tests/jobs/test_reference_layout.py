# SPDX-License-Identifier: Apache-2.0
"""The layout of a reference is read strictly, and refused where a job cannot have it."""

import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.jobs.reference_layout import Layout, notice, parse, refusal
from megatron_ttrace.trace.errors import TTraceError

sizes = st.integers(1, 9999)


@given(sizes, sizes, sizes, sizes)
def test_round_trip(tp, pp, cp, ep):
    """What is printed can be given."""
    layout = Layout(tp, pp, cp, ep)
    if layout.ranks > 1:
        assert parse(str(layout)) == layout


@given(st.text(max_size=40))
def test_any_text(text):
    """It is a layout of several ranks, or one line says what to give."""
    message = ""
    try:
        assert parse(text).ranks > 1
    except TTraceError as error:
        message = str(error)
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is one rank"),
        ("tp=1 pp=1", "is one rank"),
        ("tp=2 tp=2", "tp is given twice"),
        ("tp=0", "'tp=0' is not a size"),
        ("tp=-2", "'tp=-2' is not a size"),
        ("tp=2,pp=2", "is not a size"),
        ("tp", "is not a size"),
        ("dp=2 tp=2", "divided along tp, pp, cp, ep, not dp"),
        ("TP=2", "is not a size"),
        ("tp=99999", "is not a size"),
    ],
)
def test_not_a_layout(text, says):
    """One line that says what to give."""
    with pytest.raises(TTraceError, match=says):
        parse(text)


def job(**more):
    """The arguments of a job of 16 ranks that can have a reference on 4."""
    plain = {
        "optimizer": "adam",
        "make_vocab_size_divisible_by": 128,
        "tensor_model_parallel_size": 4,
        "pipeline_model_parallel_size": 2,
        "num_attention_heads": 8,
        "ffn_hidden_size": 64,
        "num_layers": 4,
        "seq_length": 16,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "num_experts": None,
        "micro_batch_size": 2,
        "global_batch_size": 8,
    }
    return argparse.Namespace(**{**plain, **more})


@pytest.mark.parametrize(
    ("more", "ranks", "devices", "says"),
    [
        ({}, 16, None, ""),
        ({}, 16, 4, ""),
        ({}, 16, 2, "needs 4 devices that rank 0 can use, there are 2"),
        ({}, 4, None, "give a layout with fewer ranks than the run"),
        ({"num_experts": 8}, 16, None, ""),
        ({"fp4": "e2m1", "sft": True}, 16, None, "--fp4-format, --sft cannot be traced"),
        ({"optimizer": "muon"}, 16, None, "--optimizer muon updates whole matrices"),
        ({"num_attention_heads": 7}, 16, None, "--num-attention-heads 7 cannot be divided by 2"),
        ({"num_layers": 5}, 16, None, "--num-layers 5 cannot be divided by 2"),
        ({"seq_length": 6}, 16, None, "--seq-length 6 cannot be divided by 4"),
        (
            {"group_query_attention": True, "num_query_groups": 1},
            16,
            None,
            "--num-query-groups 1 cannot be divided by 2",
        ),
        (
            {"make_vocab_size_divisible_by": 1, "tensor_model_parallel_size": 1},
            16,
            None,
            "the padded vocabulary's multiple 1 cannot be divided by 2",
        ),
    ],
)
def test_refusals(more, ranks, devices, says):
    """Before anything is made."""
    layout = Layout(tp=2, pp=2, cp=2 if "seq_length" in more else 1)
    reason = refusal(layout, job(**more), world_size=ranks, devices=devices)
    assert says in reason if says else not reason


def test_arguments_of_the_reference():
    """Its vocabulary is padded to the same size as the candidate's."""
    layout = Layout(2, 4)
    assert layout.overrides(512, experts=False) == {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 4,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "make_vocab_size_divisible_by": 256,
    }
    assert " ".join(layout.words(experts=False)) == (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --context-parallel-size 1 "
        "--expert-model-parallel-size 1"
    )


@pytest.mark.parametrize(
    ("layout", "ranks", "dp"),
    [
        (Layout(ep=4, pp=2), 8, 4),
        (Layout(tp=2, ep=2), 2, 1),
        (Layout(tp=2, ep=4), 4, 2),
        (Layout(tp=4, ep=2), 4, 1),
        (Layout(cp=2, ep=3), 6, 3),
    ],
)
def test_experts_are_divided_among_the_other_ranks(layout, ranks, dp):
    """Data-parallel ranks are added where there are too few of them."""
    assert (layout.ranks, layout.dp) == (ranks, dp)
    arguments = layout.arguments(experts=True)
    assert arguments["expert_tensor_parallel_size"] == 1
    assert arguments["sequence_parallel"] == (layout.tp > 1)


@pytest.mark.parametrize(
    ("layout", "more", "says"),
    [
        (Layout(ep=4), {"num_experts": 8}, ""),
        (Layout(ep=4), {}, "--num-experts 1 cannot be divided by 4"),
        (Layout(ep=4), {"num_experts": 6}, "--num-experts 6 cannot be divided by 4"),
        (Layout(ep=8), {"num_experts": 8}, "--global-batch-size 8 cannot be divided by 16"),
        (Layout(ep=4), {"num_experts": 8, "moe_expert_capacity_factor": 1.0}, ""),
        (
            Layout(tp=2),
            {"num_experts": 8, "moe_expert_capacity_factor": 1.0},
            "--moe-expert-capacity-factor with tp or cp differs from one device by design",
        ),
        (
            Layout(cp=2),
            {"num_experts": 8, "moe_router_load_balancing_type": "sinkhorn"},
            "sinkhorn with tp or cp differs from one device by design",
        ),
    ],
)
def test_refusals_of_experts(layout, more, says):
    """Where the layout does not fit the experts, or they are computed otherwise by design."""
    reason = refusal(layout, job(**more), world_size=16, devices=None)
    assert says in reason if says else not reason


def test_notice():
    """It never says that the reference is one device, and which axes prove little."""
    same = notice(Layout(4, 1), job())
    assert same.startswith("reference: tp=4 on 4 ranks, itself checked against one device")
    assert "both runs have tp=4" in same
    assert "both runs" not in notice(Layout(2, 4), job())
