# SPDX-License-Identifier: Apache-2.0
"""Each repair explains its fault, in these words, and not what only resembles it."""

import dataclasses
import math
from collections.abc import Callable, Mapping

import pytest
import torch

from megatron_ttrace.diagnose import position, region, replicas, scaling, sources, summands
from megatron_ttrace.diagnose.evidence import Evidence, FailedPart
from megatron_ttrace.mcore.names import EMBEDDING_WEIGHT
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.placement.placements import Shard
from megatron_ttrace.placement.plan import Step
from megatron_ttrace.trace.findings import Cause, ConstantFactor, Finding, OtherTime
from megatron_ttrace.trace.records import ROOT, STEP_LEVEL, Kind, TraceKey
from tests.diagnose.evidence_by_hand import (
    OUTPUT,
    WEIGHT,
    evidence_of,
    explain,
    hint,
    meshes,
    text,
    values,
)

Repair = Callable[[Evidence], Finding | None]
SMALL, ROWS, LONG, NOISE = values(8, 4), values(32, 12), values(64), values(64, seed=1)
BF16 = values(64, 64)
BY_TP = (Step("tp", Shard(0)),)
NORM = dataclasses.replace(WEIGHT, name="decoder.final_layernorm.weight")
TIED = dataclasses.replace(WEIGHT, name=EMBEDDING_WEIGHT)
DELTA = dataclasses.replace(WEIGHT, kind=Kind.PARAM_DELTA)
GRAD_NORM = TraceKey(1, STEP_LEVEL, Kind.GRAD_NORM, "grad_norm", 0)
QUERY = dataclasses.replace(
    OUTPUT, kind=Kind.GRAD_INPUT, name="decoder.layers.0.self_attention.core_attention"
)
NUMBERS = {"step_tokens": 256.0, "layers": 3.0}
ODD = torch.arange(32)[:, None] % 2


def on(dp: int = 1, **axes: int) -> list[Mesh]:
    """The ranks of a layout."""
    return meshes(math.prod(axes.values()) * dp, **axes)


def of(
    right: torch.Tensor,
    wrong: torch.Tensor | Mapping[int, torch.Tensor],
    ranks: list[Mesh] | None = None,
    **more: object,
) -> Evidence:
    """A tensor that ranks hold wrong: each its own, or all alike."""
    held = dict.fromkeys(range(64), wrong) if torch.is_tensor(wrong) else wrong
    return evidence_of(right, ranks or meshes(1), held, **more)  # type: ignore[arg-type]


def with_rows(first: int, last: int, value: torch.Tensor | float) -> torch.Tensor:
    """``ROWS`` with other values in some of them."""
    changed = ROWS.clone()
    changed[first:last] = value
    return changed


def token_ids() -> Evidence:
    """An embedding that gives foreign ids the table's first row."""
    key = dataclasses.replace(OUTPUT, name="embedding.word_embeddings")
    table, ids = values(16, 12), torch.arange(16).reshape(2, 8)
    trace = {
        TraceKey(1, 0, Kind.INPUT, ROOT, 0): ids,
        TraceKey(1, STEP_LEVEL, Kind.PARAM, f"{key.name}.weight", 0): table,
    }
    wrong = table[torch.where(ids < 8, ids, 0)]
    return of(table[ids], wrong, on(tp=2), key=key, trace=trace)


def stale(value: torch.Tensor, wrong: torch.Tensor | None = None) -> Evidence:
    """``wrong``, where the value of the microbatch before is ``value``."""
    key = dataclasses.replace(OUTPUT, microbatch=1)
    other = OtherTime(Cause.OTHER_TIME, microbatch=0)
    trace = {OUTPUT: value}
    wrong = values(6, 12, seed=8) if wrong is None else wrong
    return of(values(6, 12), wrong, key=key, trace=trace, others=lambda: [(other, OUTPUT)])


def samples(*chosen: int) -> Evidence:
    """The second of three batches of two, with these of the six samples instead of its own."""
    key, ids = TraceKey(1, 1, Kind.TOKENS, "tokens", 0), torch.arange(72).reshape(6, 12) % 31
    trace = {dataclasses.replace(key, microbatch=n): ids[2 * n : 2 * n + 2] for n in range(3)}
    return of(ids[2:4], ids[list(chosen)], key=key, trace=trace, tolerance=0.0)


HALF_ONES = torch.cat([torch.ones(3, 12), values(3, 12, seed=7)])


def biased(times: int) -> Evidence:
    """A bias that is added so many times too often."""
    x, bias = values(6, 2, 12), values(12, seed=3)
    trace = {TraceKey(1, STEP_LEVEL, Kind.PARAM, f"{OUTPUT.name}.bias", 0): bias}
    return of(x, x + times * bias, on(dp=2), key=OUTPUT, trace=trace)


def partial(axes: str, **layout: int) -> Evidence:
    """Each rank holds a summand of its own, alike on ranks that differ along other axes only."""
    ranks = on(**layout)
    places = {mesh.rank: tuple(mesh.at(axis) for axis in axes.split("+")) for mesh in ranks}
    summands = {
        place: values(64, seed=7 + n) for n, place in enumerate(dict.fromkeys(places.values()))
    }
    last = max(summands)
    summands[last] = LONG - sum(v for place, v in summands.items() if place != last)
    return of(LONG, {rank: summands[place] for rank, place in places.items()}, ranks, key=NORM)


def partial_shards() -> Evidence:
    """Shards over tp whose sum over cp was left out."""
    reference, ranks = values(8, 16), on(tp=2, cp=2)
    share = values(4, 16, seed=5)
    right = {mesh.rank: reference.chunk(2)[mesh.at("tp")] for mesh in ranks}
    held = {mesh.rank: share if mesh.at("cp") else right[mesh.rank] - share for mesh in ranks}
    return of(reference, held, ranks, placement=BY_TP)


def shuffled() -> torch.Tensor:
    """``ROWS`` in another order."""
    return ROWS[torch.randperm(32, generator=torch.Generator().manual_seed(0))]


def per_rank(*factors: float, **layout: int) -> Evidence:
    """Each rank's values multiplied by a factor."""
    return of(SMALL, {rank: SMALL * ratio for rank, ratio in enumerate(factors)}, on(**layout))


def exchanged() -> Evidence:
    """Ranks that hold each other's shards."""
    return of(ROWS, {0: ROWS[16:], 1: ROWS[:16]}, on(tp=2), placement=BY_TP)


def copies(wrong: torch.Tensor, tolerance: float = 1e-4) -> Evidence:
    """Four, of which the last one is wrong."""
    return of(ROWS, dict.fromkeys(range(3), ROWS) | {3: wrong}, on(dp=4), tolerance=tolerance)


def rounded(dtype: torch.dtype) -> Evidence:
    """Values in a coarser dtype."""
    return of(BF16, BF16.to(dtype).float(), tolerance=1e-6)


def slice_of_a_rank() -> Evidence:
    """Other rows where one of four ranks has its part."""
    return of(ROWS, with_rows(24, 32, values(8, 12, seed=4)), on(tp=4))


AVERAGE = of(LONG, {0: LONG + NOISE, 1: LONG - NOISE}, on(dp=2), key=NORM)
SOFTMAX = of(values(6, 2, 4, 16), values(6, 2, 4, 16) / 4, key=QUERY)
COLUMNS, SQUARE, LOGARITHMS = values(12, 2, 8), values(9, 9), SMALL + 3


EXPLAINED: list[tuple[Repair, Evidence, str]] = [
    (scaling.zero, of(SMALL, 0 * SMALL, on(dp=2), key=DELTA), "never updated"),
    (scaling.zero, of(SMALL, 0 * SMALL, on(dp=2)), "the gradient is zero"),
    (
        scaling.factor,
        of(SMALL, 3 * SMALL, on(tp=2, cp=3)),
        "3.000 times too large = the size of cp",
    ),
    (scaling.factor, of(SMALL, SMALL / 4, on(cp=4)), "4.000 times too small"),
    (scaling.factor, of(SMALL, 6 * SMALL, on(tp=2, pp=3)), "tp·pp"),
    (scaling.factor, of(SMALL, 1.3 * SMALL, on(tp=2)), "not the size"),
    (scaling.factor, of(SMALL, -SMALL, on(tp=2)), "sign is flipped"),
    (scaling.factor, SOFTMAX, "softmax scale"),
    (scaling.factor_per_rank, per_rank(2, 3, cp=2), "rank 0: 2, rank 1: 3"),
    (
        explain,
        of(values(64, 8), {0: values(64, 8), 1: values(64, 8) / 5}, on(tp=2), key=NORM),
        "5.000 times too small",
    ),
    (
        explain,
        of(torch.tensor(6.0), torch.tensor(6.0) / 2**0.5, on(tp=2), key=GRAD_NORM),
        "1.414 times too small = the root of the size of tp",
    ),
    (
        explain,
        of(SMALL, 256 * SMALL, on(dp=2), numbers=NUMBERS),
        "the number of tokens of the global batch",
    ),
    (explain, of(SMALL, 3 * SMALL, on(dp=2), numbers=NUMBERS), "not the size"),
    (explain, of(SMALL, 512 * SMALL, on(dp=2), numbers=NUMBERS), "the size of dp times the number"),
    (
        explain,
        of(SMALL, 2**15 * SMALL, on(dp=2), numbers=NUMBERS | {"shards": 64.0}),
        "not the size",
    ),
    *(
        (explain, of(ROWS, each * ROWS.view(2, 16, 12).sum(0), on(tp=2), placement=BY_TP), words)
        for each, words in ((1, "different parts that ranks along tp"), (0.5, "or mean, of the"))
    ),
    (scaling.rounded, rounded(torch.bfloat16), "rounded to bf16"),
    (scaling.rounded, rounded(torch.float16), "rounded to fp16"),
    (scaling.rounded, rounded(torch.float8_e4m3fn), "rounded to FP8 (E4M3)"),
    (
        explain,
        of(LOGARITHMS, LOGARITHMS - math.log(2), on(tp=2)),
        "minus the logarithm of the size of tp",
    ),
    (explain, of(LOGARITHMS, LOGARITHMS + math.log(3), on(cp=3)), "logarithm of the size of cp"),
    (position.rows, of(ROWS, ROWS.roll(-3, 0)), "another order"),
    (position.rows, of(ROWS, ROWS.flip(0)), "reverse order"),
    (position.rows, of(ROWS, ROWS.roll(16, 0)), "two halves of its rows are swapped"),
    (position.rows, of(ROWS, ROWS[:1].expand_as(ROWS)), "what belongs there is nowhere"),
    # Another token's row, which is right where it belongs, too.
    (position.rows, of(ROWS, with_rows(4, 5, ROWS[9:10])), "1 of 32 rows hold the values of other"),
    (position.rows, of(ROWS, shuffled()), "another order"),
    (position.rows, of(COLUMNS, COLUMNS.roll(4, 2), key=OUTPUT), "halves of its columns"),
    (position.rows, exchanged(), "rank 0 holds rows 16..31"),
    (
        position.rows,
        of(ROWS, {0: ROWS[2:18], 1: ROWS[16:]}, on(tp=2), placement=BY_TP),
        "shifted by 2",
    ),
    (explain, of(SQUARE, SQUARE.T.contiguous()), "transposed"),
    (region.scaled_rows, of(ROWS, with_rows(4, 7, 0)), "rows 4..6 (9%) are zero, the rest right"),
    (explain, of(ROWS, ROWS * (1 + ODD), on(tp=2)), "2.000 times too large = the size of tp; the"),
    (explain, of(ROWS, ROWS * (1 - 2 * ODD)), "1, 3, 5 and 13 more (50%): the sign is flipped"),
    (region.extent, slice_of_a_rank(), "slice of tp 3"),
    (explain, token_ids(), "token id lies in 8..15 (the part of tp 1)"),
    (explain, token_ids(), "row 0 of the table"),
    (explain, samples(1, 3), "its samples are the reference's, but of other microbatches"),
    (sources.elsewhere, stale(values(6, 12, seed=8)), "holds the value of microbatch 0"),
    (summands.addend, biased(1), "added 2 times"),
    (summands.addend, biased(-1), "is missing"),
    (explain, partial("tp", tp=2), "partial sums over tp:"),
    (explain, partial("cp", tp=2, cp=2), "partial sums over cp:"),
    (explain, partial("tp+cp", tp=2, cp=2), "partial sums over tp and cp:"),
    (explain, AVERAGE, "their mean over dp is the reference"),
    (explain, partial_shards(), "partial sums over cp"),
    (
        explain,
        of(ROWS, {0: shuffled(), 1: ROWS - shuffled()}, on(pp=2), key=TIED),
        "partial sums over pp",
    ),
    (
        replicas.some_copies,
        copies(shuffled()),
        "rank 3 holds a wrong copy, the copies on ranks 0-2",
    ),
]


@pytest.mark.parametrize(
    ("repair", "evidence", "words"), EXPLAINED, ids=[words for *_, words in EXPLAINED]
)
def test_explained(repair: Repair, evidence: Evidence, words: str) -> None:
    assert words in text(repair(evidence), evidence.key)


@pytest.mark.parametrize(
    ("evidence", "cause", "axes"),
    [
        (of(SMALL, 6 * SMALL, on(tp=2, pp=3)), Cause.TOO_LARGE, ("tp", "pp")),
        (exchanged(), Cause.OFFSET, ("tp",)),
        (partial("tp+cp", tp=2, cp=2), Cause.PARTIAL, ("tp", "cp")),
    ],
)
def test_causes_and_axes(evidence: Evidence, cause: Cause, axes: tuple[str, ...]) -> None:
    finding = explain(evidence)
    assert finding is not None
    assert (finding.cause, finding.axes) == (cause, axes)


UNEXPLAINED: dict[str, tuple[Repair, Evidence]] = {
    "copies within a blind tolerance": (replicas.some_copies, copies(shuffled(), 0.3)),
    "one value is not zero": (scaling.zero, of(SMALL, SMALL * (SMALL.max() == SMALL) * 1e-9)),
    "no multiple": (scaling.factor, of(SMALL, 2 * SMALL + values(8, 4, seed=9), on(dp=2))),
    "two factors": (scaling.factor, per_rank(2, 3, cp=2)),
    "noise of bf16's size": (
        scaling.rounded,
        of(BF16, BF16 * (1 + values(64, 64, seed=3) * 2**-9), tolerance=1e-6),
    ),
    "any mean error is some constant": (scaling.shift, of(SMALL, SMALL + 0.3, on(tp=2))),
    "rows from nowhere": (position.rows, of(ROWS, values(32, 12, seed=5))),
    "rows from nowhere, any repair": (explain, of(ROWS, values(32, 12, seed=5))),
    "all rows": (region.extent, of(ROWS, ROWS + 1)),
    "one element": (region.scaled_rows, of(LONG, LONG * (1 + (torch.arange(64) == 3)))),
    "a rank's rows": (explain, slice_of_a_rank()),
    "a microbatch of ones, too": (sources.elsewhere, stale(torch.ones(6, 12), torch.ones(6, 12))),
    "ones in a part": (explain, stale(HALF_ONES, torch.where(HALF_ONES == 1, 1.0, values(6, 12)))),
    "samples of one other microbatch": (region.other_samples, samples(0, 1)),
    "another microbatch": (sources.elsewhere, stale(values(6, 12, seed=9))),
    "unrelated copies": (explain, of(LONG, {0: NOISE, 1: values(64, seed=2)}, on(tp=2), key=NORM)),
    "one of four copies": (explain, copies(values(32, 12, seed=4))),
    "opposite signs around zero": (
        explain,
        of(
            torch.zeros(4),
            {n: (-1) ** n * torch.tensor([0.1, -0.1, 0.1, 0.1]) for n in (0, 1)},
            on(tp=2),
        ),
    ),
}


@pytest.mark.parametrize(("repair", "evidence"), UNEXPLAINED.values(), ids=UNEXPLAINED)
def test_unexplained(repair: Repair, evidence: Evidence) -> None:
    assert repair(evidence) is None


@pytest.mark.parametrize(
    ("evidence", "words"),
    [
        (of(SMALL, 0 * SMALL, key=DELTA), ""),
        (SOFTMAX, "twice"),
        (AVERAGE, "missing average over dp"),
    ],
)
def test_hints(evidence: Evidence, words: str) -> None:
    suggested = hint(explain(evidence), evidence.key)
    assert suggested
    assert words in suggested


@pytest.mark.parametrize(("noise", "is_factor"), [(0.25, True), (0.8, False)])
def test_a_larger_value_has_larger_rounding(noise: float, is_factor: bool) -> None:
    """Multiplying by five multiplies rounding by five; more than that is another fault.

    ``noise`` is in tolerances, of the values before the repair.
    """
    tolerance, reference = 5e-2, values(32, 32)
    wrong = reference / 5 + noise * tolerance * values(32, 32, seed=3)
    finding = scaling.factor(of(reference, wrong, tolerance=tolerance))
    assert (finding is not None) is is_factor
    assert finding is None or finding.ratio == pytest.approx(0.2, rel=0.02)


@pytest.mark.parametrize(
    ("reference", "tolerance", "ratio", "is_explained"),
    [
        # A number that is nearly twice another one is its double only if it is so exactly.
        (torch.tensor(3.0), 1e-2, 2.0, True),
        (torch.tensor(3.0), 1e-2, 2.001, True),
        (torch.tensor(3.0), 1e-2, 2.01, False),
        # Any odd function of equal values is a factor: only a size is reported.
        (torch.full((64,), 0.4), 1e-4, 1.37, False),
        (torch.full((64,), 0.4), 1e-4, 2.0, True),
        (0.4 * LONG.sign(), 1e-4, 1.37, False),
        (0.4 * LONG.sign(), 1e-4, 2.0, True),
    ],
)
def test_few_values_fit_a_size_by_chance(
    reference: torch.Tensor, tolerance: float, ratio: float, is_explained: bool
) -> None:
    evidence = of(reference, reference * ratio, on(dp=2), tolerance=tolerance)
    assert (explain(evidence) is not None) is is_explained


def test_sizes_that_are_nearly_equal() -> None:
    """Only those that are a repair are reported."""
    key = dataclasses.replace(WEIGHT, kind=Kind.GRAD_OUTPUT)
    numbers = {"tokens": 64.0, "step_tokens": 63.0}
    reference = values(16, 8)
    finding = explain(
        of(reference, reference * 64, on(dp=2), key=key, tolerance=1e-2, numbers=numbers)
    )
    assert isinstance(finding, ConstantFactor)
    assert finding.sizes == (("tokens",),)


@pytest.mark.parametrize(
    ("counted", "sizes"),
    [({}, (("dp",),)), ({"microbatches": 2.0}, (("dp",), ("microbatches",)))],
)
def test_tokens_of_microbatches_are_not_taken_for_ranks(
    counted: dict[str, float], sizes: tuple[tuple[str, ...], ...]
) -> None:
    """A gradient that is divided by the number of tokens may be off by microbatches."""
    finding = explain(of(LONG, LONG * 2, on(dp=2), key=WEIGHT, numbers=counted))
    assert isinstance(finding, ConstantFactor)
    assert finding.sizes == sizes


@pytest.mark.parametrize(("axis", "sizes"), [("tp", (("tp",),)), ("pp", ()), ("dp", ())])
def test_sizes_by_which_no_activation_is_off(axis: str, sizes: tuple[tuple[str, ...], ...]) -> None:
    """Nothing in a forward pass is summed over pipeline stages or replicas."""
    finding = explain(of(LONG, LONG / 2, on(**{axis: 2}), key=OUTPUT))
    assert isinstance(finding, ConstantFactor)
    assert finding.sizes == sizes


LINEAR = TraceKey(1, 0, Kind.OUTPUT, "decoder.layers.0.self_attention.linear_qkv", 0)
S, B, D, WIDE = 8, 2, 6, 12
TOP = {"E4M3": 448.0, "E5M2": 57344.0}


def fed(last: float = 5.0) -> torch.Tensor:
    """The input of a linear layer, whose halves have these largest values."""
    x = values(S, B, D, seed=1)
    x[0, 0, 0], x[S - 1, 0, 0] = 7.0, last
    return x


def product(
    *factors: float, bias: bool = True, last: float = 5.0, norm: torch.Tensor | None = None
) -> Evidence:
    """A column-parallel layer on two ranks, whose product is off by a factor on each."""
    x, weight = fed(last), values(WIDE, D, seed=2)
    b = values(WIDE, seed=3) * (1.0 if bias else 0.0)
    right = x @ weight.T
    trace = {dataclasses.replace(LINEAR, kind=Kind.INPUT): x}
    for leaf, value in (("bias", b if bias else None), ("layer_norm_weight", norm)):
        if value is not None:
            trace[TraceKey(1, STEP_LEVEL, Kind.PARAM, f"{LINEAR.name}.{leaf}", 0)] = value
    halves = zip(factors, right.chunk(2, -1), b.chunk(2), strict=True)
    held = {rank: half * ratio + added for rank, (ratio, half, added) in enumerate(halves)}
    place = (Step("tp", Shard(2)),)
    return of(right + b, held, on(tp=2), key=LINEAR, trace=trace, placement=place, tolerance=1e-2)


OWN = "of a cast to FP8 (E4M3) of its own part of the sequence"


PRODUCTS = [
    (product(0.5, 0.25), Cause.FACTOR, "(rank 0: 0.5, rank 1: 0.25), its bias is right", ""),
    (product(2.0, 2.0, bias=False), Cause.TOO_LARGE, "2.000 times too large = the size of tp", ""),
    (product(448 / 7, 448 / 7), Cause.CAST, "FP8 (E4M3) of its input", "applied and never undone"),
    (product(7 / 448, 7 / 448, last=7.0), Cause.CAST, OWN, "undone"),
    (product(7 / 448, 7 / 448, last=7.0), Cause.CAST, "or of its input, whose scale is the", ""),
    *(
        (product(7 / top, 5 / top, bias=bias), Cause.CAST, OWN.replace("E4M3", name), "undone and")
        for name, top in TOP.items()
        for bias in (True, False)
    ),
]


@pytest.mark.parametrize(("evidence", "cause", "words", "advice"), PRODUCTS)
def test_products(evidence: Evidence, cause: Cause, words: str, advice: str) -> None:
    """A product that is off while its bias is right; scales of casts to FP8."""
    finding = explain(evidence)
    assert finding is not None
    assert finding.cause is cause
    assert words in text(finding)
    assert advice in hint(finding)


def test_the_norm_that_is_fused_with_a_product() -> None:
    """What is multiplied is the normed input."""
    weight = values(D, seed=5)
    normed = fed() * torch.rsqrt(fed().square().mean(-1, keepdim=True) + 1e-5) * weight
    tops = [float(half.abs().amax()) for half in normed.chunk(2)]
    finding = scaling.product(product(*(top / 448 for top in tops), norm=weight))
    assert finding is not None
    assert OWN in text(finding)


def test_what_is_no_cast() -> None:
    """A size of the layout; an error that is not a factor; another kind of tensor."""
    finding = scaling.product(product(2.0, 2.0))
    assert finding is not None
    assert (finding.cause, finding.dtype) == (Cause.FACTOR, "")
    evidence = product(0.5, 0.25)
    noisy = [
        dataclasses.replace(part, pieces=tuple(p + values(*p.shape, seed=8) for p in part.pieces))
        for part in evidence.parts
    ]
    assert scaling.product(dataclasses.replace(evidence, parts=noisy)) is None
    key = dataclasses.replace(LINEAR, kind=Kind.GRAD_INPUT)
    assert scaling.product(dataclasses.replace(evidence, key=key)) is None


def test_rows_that_differ_from_column_to_column() -> None:
    """None is in one place, so that none can be in another; the search goes on."""
    boxes = (Box((0, 0), (4, 8), (0, 0)), Box((4, 8), (4, 8), (0, 8)))
    evidence = evidence_of(values(8, 16), meshes(1), lambda rank, right: right * 2)
    part = FailedPart.of(values(4, 16, seed=1), evidence.parts[0].mesh, boxes, 1.0)
    assert position.rows(dataclasses.replace(evidence, parts=[part])) is None


@pytest.mark.parametrize(
    ("kind", "layout", "sizes"),
    [
        # Divided by the size of dp, but summed over more ranks.
        (Kind.MAIN_GRAD, {"tp": 2, "etp": 1}, (("tp",), ("dp",))),
        (Kind.PARAM_DELTA, {"tp": 2, "etp": 1}, ()),
        # What numbers its own ranks comes first.
        (Kind.MAIN_GRAD, {"tp": 2, "etp": 1, "ep": 2}, (("ep",), ("edp",))),
    ],
)
def test_a_factor_of_experts(
    kind: Kind, layout: dict[str, int], sizes: tuple[tuple[str, ...], ...]
) -> None:
    """Their gradients are scaled by sizes of the other layers' axes too."""
    key = dataclasses.replace(WEIGHT, kind=kind, name="decoder.layers.0.mlp.experts.w.weight")
    finding = scaling.factor(of(LONG, LONG / 2, meshes(4, **layout), key=key))
    assert finding is not None
    assert finding.sizes == sizes
