# SPDX-License-Identifier: Apache-2.0
"""Whatever a job holds, no repair ends with an error: that would drop a cause without a word."""

import dataclasses
import math
import zlib

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.diagnose.search import search
from megatron_ttrace.placement.placements import Shard, ZigZag
from megatron_ttrace.placement.plan import Step
from megatron_ttrace.trace.records import ROOT, STEP_LEVEL, Kind, TraceKey
from tests.diagnose.evidence_by_hand import evidence_of, meshes, values

LAYER = "decoder.layers.0"
MODULES = st.sampled_from(
    (
        *("embedding.word_embeddings", "output_layer", "decoder.final_layernorm", ROOT),
        *(f"{LAYER}.input_layernorm", f"{LAYER}.mlp.router", f"{LAYER}.mlp"),
        *(f"{LAYER}.self_attention.linear_qkv", f"{LAYER}.self_attention.core_attention"),
        *(f"{LAYER}.mlp.experts.linear_fc1", f"{LAYER}.mlp.linear_fc2", f"{LAYER}.mlp.linear_fc1"),
    )
)
PARAMETERS = st.sampled_from(("weight", "bias", "layer_norm_weight", "layer_norm_bias", "weight1"))
OF_PARAMETERS = st.sampled_from((Kind.MAIN_GRAD, Kind.PARAM, Kind.PARAM_DELTA, Kind.EXP_AVG))
OF_MODULES = st.sampled_from((Kind.OUTPUT, Kind.INPUT, Kind.GRAD_INPUT, Kind.GRAD_OUTPUT))
SIZES = st.sampled_from([(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1)])
SHAPES = st.lists(st.sampled_from([1, 2, 4, 8, 13, 16]), min_size=1, max_size=4).map(tuple)
FEEDS = {Kind.GRAD_OUTPUT: 0, Kind.INPUT: 1}
ODD = st.sampled_from([0.0, 1.0, -3.0, math.inf, math.nan])


def parameters(module):
    """Keys of a module's parameters."""
    return st.builds(
        lambda kind, leaf: TraceKey(1, STEP_LEVEL, kind, f"{module}.{leaf}", 0),
        OF_PARAMETERS,
        PARAMETERS,
    )


KEYS = MODULES.flatmap(
    lambda module: st.one_of(
        parameters(module),
        st.builds(lambda kind, index: TraceKey(1, 0, kind, module, index), OF_MODULES, st.just(0)),
    )
)


@st.composite
def evidence(draw):
    """A tensor of any shape that fails in any way, in a trace whose tensors have any shapes."""
    shape = draw(SHAPES)
    tp, cp, dp = draw(SIZES)
    reference = values(*shape)
    placement = []
    for axis, size, kind in (("tp", tp, Shard), ("cp", cp, ZigZag)):
        dims = [dim for dim, length in enumerate(shape) if length % (2 * tp * cp) == 0]
        dims = dims if kind is Shard else [dim for dim in dims if dim == 0]
        if size > 1 and dims and draw(st.booleans()):
            placement.append(Step(axis, kind(draw(st.sampled_from(dims)))))
    shapes = draw(st.lists(st.one_of(st.just(shape), SHAPES), min_size=1, max_size=3))
    floats = st.sampled_from([torch.float32, torch.bfloat16])
    dtypes = draw(st.lists(st.one_of(floats, st.just(torch.int64)), min_size=1, max_size=3))

    def whole(key):
        """Any tensor there is; some are missing."""
        number = zlib.crc32(repr(key).encode())
        if key.microbatch > 2 or number % 5 == 0:
            return None
        made = shapes[number % len(shapes)]
        if fits and len(shape) == 2 and key.kind in FEEDS:
            # What makes a weight's gradient has its sizes, and any number of tokens.
            made = (*made[:-1], shape[FEEDS[key.kind]])
        found = values(*made, seed=number % 97)
        return (4 * found).to(dtypes[number % len(dtypes)])

    fits = draw(st.booleans())
    noise, factor, filled = draw(st.booleans()), draw(st.sampled_from([0.0, 1.0, 2.0])), draw(ODD)

    def held(rank, right):
        wrong = right * factor + (values(*right.shape, seed=rank) if noise else 0)
        if wrong.numel():
            wrong.view(-1)[0] = filled
        return wrong

    made = evidence_of(
        reference,
        meshes(tp * cp * dp, tp=tp, cp=cp),
        held,
        placement=tuple(placement),
        key=draw(KEYS),
        microbatches=draw(st.sampled_from([1, 2])),
        seq_length=draw(st.sampled_from([0, 8, 16])),
        alike=lambda module: (f"{LAYER}.mlp.linear_fc1", "decoder.final_layernorm"),
        numbers={"num_microbatches": 2.0, "tokens": 128.0},
    )
    return dataclasses.replace(made, whole=whole)


@given(evidence())
def test_no_repair_ends_with_an_error(failed):
    search(failed)
