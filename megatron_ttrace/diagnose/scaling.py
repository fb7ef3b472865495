# SPDX-License-Identifier: Apache-2.0
"""Repairs of the size: all zero, off by a constant factor, sign, rounded too coarsely."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping

import torch

from megatron_ttrace.diagnose.evidence import (
    Evidence,
    FailedPart,
    Pieces,
    axes_of,
    axis_combinations,
    dot,
    gain_of,
)
from megatron_ttrace.diagnose.sources import normed
from megatron_ttrace.mcore.roles import INNER_ATTENTION
from megatron_ttrace.placement.mesh import AXES, DENSE
from megatron_ttrace.trace.findings import (
    CastOperand,
    Cause,
    ConstantFactor,
    Finding,
    ProductFactors,
    RankFactors,
    Rounded,
    Shift,
)
from megatron_ttrace.trace.records import MOMENTS, Kind

FACTORS = (Cause.FACTOR, Cause.TOO_LARGE, Cause.TOO_SMALL)
_SOFTMAX = "softmax"
_ALIKE = 0.1
"""How near the norms of values are that hold the same numbers elsewhere, or rounded."""
_ROUGH = 0.02
"""A factor further from a size than this is another one, however wide the tolerance is."""
_COUNT_IN = {
    "tokens": (Kind.GRAD_OUTPUT, Kind.LOSS),
    "step_tokens": (Kind.GRAD_OUTPUT, Kind.MAIN_GRAD),
    "loss_scale": (Kind.GRAD_OUTPUT, Kind.MAIN_GRAD, *MOMENTS),
    "microbatches": (Kind.MAIN_GRAD,),
    "shards": (Kind.MAIN_GRAD,),
    "clipping": MOMENTS,
    "layers": (Kind.METRIC,),
    "auxiliary": (Kind.METRIC,),
    "z": (Kind.METRIC,),
    "passes": (Kind.METRIC, Kind.BUFFER),
}
"""What a number of the job is a factor of."""
_NOT_IN_FORWARD = ("pp", "dp")
"""Axes over whose ranks nothing in a forward pass is summed or averaged."""
_LARGEST = 50.0
"""Of the logarithm of a size."""
_FORMATS = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}
_EQUAL = 1e-4
"""Below what one step of bf16 in the largest value would make."""
_COARSE = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    **{f"FP8 ({name})": dtype for name, dtype in _FORMATS.items()},
}


def zero(evidence: Evidence) -> Finding | None:
    """Every failing part is all zero, the reference is not. The repair: any value at all."""
    is_zero = not any(piece.any() for part in evidence.parts for piece in part.pieces)
    return Finding(Cause.ZERO) if is_zero else None


def factor(evidence: Evidence) -> ConstantFactor | None:
    """One constant for all failing parts. The repair: divide by it, or by the size that it is."""
    best = evidence.factor()

    def repairs(ratio: float, free: int) -> bool:
        divide = functools.partial(_divided, ratio)
        return evidence.repairs(divide, free, lambda part: gain_of(ratio))

    found = tested(evidence, constant_factor(evidence, best), repairs) if best else None
    expected = {part.factor for part in evidence.parts}
    if found and len(expected) == 1 and abs(found.ratio * max(expected) - 1) < _ROUGH:
        return dataclasses.replace(found, unscaled=True)
    return found


def tested(
    evidence: Evidence, named: ConstantFactor, repairs: Callable[[float, int], bool]
) -> ConstantFactor | None:
    """The best fitting factor with those of its sizes that are a repair, or as it is, without one.

    ``repairs`` says whether a factor is a repair, with how many numbers were fitted for it.
    """
    if named.cause is Cause.SIGN and repairs(-1.0, 0):
        return named
    layout = sizes_of(evidence)
    is_repair: dict[float, bool] = {}
    sizes = []
    for names in named.sizes:
        size = math.prod(layout[name] for name in names)
        size = math.sqrt(size) if named.root else size
        size = size if (size > 1) is (abs(named.ratio) > 1) else 1 / size
        if size not in is_repair:
            is_repair[size] = repairs(math.copysign(size, named.ratio), 0)
        sizes += [names] * is_repair[size]
    if sizes:
        axes = tuple(axis for axis in named.axes if any(axis in names for names in sizes))
        return dataclasses.replace(named, axes=axes, sizes=tuple(sizes))
    cause = Cause.TOO_LARGE if abs(named.ratio) > 1 else Cause.TOO_SMALL
    return ConstantFactor(cause, ratio=named.ratio) if repairs(named.ratio, 1) else None


def rescaled(evidence: Evidence) -> Iterator[tuple[Finding, Evidence]]:
    """Divide by a size of the layout, or by its inverse, that the values are about too large."""
    sides = [part.pieces for part in evidence.parts], map(evidence.expected, evidence.parts)
    ours, theirs = (math.sqrt(dot((pieces, pieces) for pieces in side)[1]) for side in sides)
    if not (theirs and 0 < ours < math.inf):
        return
    evidence.work.spend(2 * evidence.elements)
    seen: set[float] = set()
    for _, size in products(sizes_of(evidence)):
        for ratio in (size, 1 / size):
            if ratio not in seen and abs(ours / theirs / ratio - 1) < _ALIKE:
                seen.add(ratio)
                after = evidence.repaired(functools.partial(_divided, ratio))
                if after is not None:
                    after = dataclasses.replace(after, gain=evidence.gain * gain_of(ratio))
                    yield constant_factor(evidence, ratio), after


def _divided(ratio: float, part: FailedPart) -> list[torch.Tensor]:
    return [piece / ratio for piece in part.pieces]


def shift(evidence: Evidence) -> Shift | None:
    """The logarithm of a size is added to all values. The repair: subtract it."""
    total = 0.0
    for part in evidence.parts:
        total += sum(float(error.sum(dtype=torch.float64)) for error in evidence.less(part))
    constant = total / evidence.elements
    if not -_LARGEST < constant < _LARGEST:
        return None

    def repairs(ratio: float, free: int) -> bool:
        if ratio <= 0:
            return False
        return evidence.repairs(lambda part: [p - math.log(ratio) for p in part.pieces], free)

    fitted = tested(evidence, constant_factor(evidence, math.exp(constant)), repairs)
    if fitted is None or not fitted.sizes:
        return None
    return Shift(fitted.cause, fitted.axes, constant=constant, sizes=fitted.sizes)


def factor_per_rank(evidence: Evidence) -> RankFactors | None:
    """Another constant for each rank. The repair: divide each part by its own."""
    factors = tuple(sorted(_per_rank(evidence).items()))
    return RankFactors(Cause.FACTOR, factors=factors) if len(factors) > 1 else None


def product(evidence: Evidence) -> ProductFactors | None:
    """Each rank's product is off by a factor. The repair: divide by it, and leave the bias.

    ``y = x Wᵀ + b``. A scale that was lost on the way into the product (that of a cast to FP8,
    above all) changes the first term and leaves the second. Without a bias it is the whole tensor
    that is off; reported is then only the scale of a cast.
    """
    if evidence.key.kind is not Kind.OUTPUT:
        return None
    bias = evidence.bias()
    factors = _per_rank(evidence, bias)
    if not factors:
        return None
    plain = ProductFactors(Cause.FACTOR, factors=tuple(sorted(factors.items())), has_bias=True)
    return _cast(evidence, plain, factors) or (None if bias is None else plain)


def _per_rank(evidence: Evidence, bias: torch.Tensor | None = None) -> dict[int, float]:
    """What each failing rank's part less ``bias`` is multiplied by; empty if it is no factor."""
    added = (torch.zeros(()) if bias is None else bias).expand(evidence.reference.shape)
    right = evidence.reference.float() - added.float()
    factors = {
        part.rank: evidence.ratio([(evidence.less(part, added), evidence.expected(part, right))])
        for part in evidence.parts
    }

    def divide(part: FailedPart) -> list[torch.Tensor]:
        pairs = zip(evidence.less(part, added), evidence.expected(part, added), strict=True)
        return [scaled / factors[part.rank] + b for scaled, b in pairs]

    if not all(factors.values()):
        return {}
    return factors if evidence.repairs(divide, 1, lambda p: gain_of(factors[p.rank])) else {}


def _cast(
    evidence: Evidence, plain: ProductFactors, factors: Mapping[int, float]
) -> ProductFactors | None:
    """Whether each rank's factor is the scale of a cast of what it multiplies.

    With sequence parallelism a rank holds a part of the sequence and multiplies all of it.
    """
    name = evidence.key.name
    fed = evidence.tensor(Kind.INPUT, name)
    if fed is None or fed.ndim < 2:
        return None
    # What was cast had the precision of the run.
    rows = normed(evidence, name.split("#")[0], fed.float()).view(fed.shape).to(fed.dtype)
    size = evidence.size("tp")
    operands = {CastOperand.INPUT: dict.fromkeys(factors, rows)}
    if size > 1 and len(rows) % size == 0:
        chunks = rows.chunk(size)
        at = {rank: evidence.meshes[rank].at("tp") for rank in factors}
        operands[CastOperand.OWN_PART] = {rank: chunks[at[rank]] for rank in factors}
    casts: list[tuple[float, CastOperand, str, bool]] = []
    for (operand, by_rank), (dtype, form) in itertools.product(operands.items(), _FORMATS.items()):
        tops = {rank: float(tensor.abs().amax()) for rank, tensor in by_rank.items()}
        if all(tops.values()):
            scales = {rank: torch.finfo(form).max / top for rank, top in tops.items()}
            undone = max(abs(factors[rank] * scale - 1) for rank, scale in scales.items())
            kept = max(abs(factors[rank] / scale - 1) for rank, scale in scales.items())
            casts += [(undone, operand, dtype, True), (kept, operand, dtype, False)]
    if not casts or min(casts)[0] > max(evidence.tolerance.value, 1e-3):
        return None
    off, operand, dtype, inverse = min(casts)
    # Each part's largest value can be that of the whole.
    equal = {cast[1] for cast in casts if cast[2:] == (dtype, inverse) and cast[0] - off < _EQUAL}
    return dataclasses.replace(
        plain,
        cause=Cause.CAST,
        has_bias=evidence.bias() is not None,
        dtype=dtype,
        inverse=inverse,
        operand=operand if len(equal) == 1 else CastOperand.EITHER,
    )


def rounded(evidence: Evidence) -> Rounded | None:
    """The reference, rounded to a coarser dtype. The repair: do not round."""
    tolerance = evidence.tolerance.value
    for (name, dtype), scaled in itertools.product(_COARSE.items(), (False, True)):
        too_fine = torch.finfo(dtype).eps <= 4 * tolerance
        if too_fine or tolerance >= 0.5 or (scaled and dtype.itemsize > 1):
            continue
        round_off = functools.partial(_round, dtype=dtype, scaled=scaled)

        def unrounded(part: FailedPart, of: Callable[..., torch.Tensor] = round_off) -> Pieces:
            # c is round(r): the error that is left beside what rounding explains.
            pairs = zip(part.pieces, evidence.expected(part), strict=True)
            return [right + (piece - of(right)) for piece, right in pairs]

        if evidence.repairs(unrounded):
            return Rounded(Cause.PRECISION, dtype=name, scaled=scaled)
    return None


def _round(values: torch.Tensor, dtype: torch.dtype, scaled: bool) -> torch.Tensor:
    if not scaled:
        limit = torch.finfo(dtype).max
        return values.clamp(-limit, limit).to(dtype).float()
    top = values.abs().amax()
    scale = torch.finfo(dtype).max / top if top > 0 else torch.ones(())
    return (values * scale).to(dtype).float() / scale


def constant_factor(evidence: Evidence, value: float) -> ConstantFactor:
    """A factor, and the axes whose size it is."""
    near = min(max(2 * evidence.tolerance.value, 1e-4), _ROUGH)
    if abs(value + 1) <= near:
        return ConstantFactor(Cause.SIGN, ratio=value)
    size = max(abs(value), 1 / abs(value))
    # A norm is the root of a sum of squares, which a size is a factor of.
    root = evidence.key.kind is Kind.GRAD_NORM
    size = size**2 if root else size
    sizes: list[tuple[str, ...]] = []
    for among in (_own_sizes(evidence), sizes_of(evidence)):
        for axes, number in products(among):
            if sizes and len(axes) > len(sizes[0]):
                break
            if abs(max(number, 1 / number) / size - 1) <= near:
                sizes.append(axes)
        if sizes:
            break
    if sizes == [(_SOFTMAX,)]:
        return ConstantFactor(Cause.SOFTMAX_SCALE, ratio=value, sizes=tuple(sizes))
    cause = Cause.TOO_LARGE if abs(value) > 1 else Cause.TOO_SMALL
    axes = tuple(dict.fromkeys(itertools.chain(*sizes)))
    return ConstantFactor(cause, axes, ratio=value, sizes=tuple(sizes), root=root)


def products(sizes: Mapping[str, float]) -> Iterator[tuple[tuple[str, ...], float]]:
    """What one fault is likely to be off by, with names: the ranks of a group, times a number.

    Products of more numbers are nearly all powers of two, and fit whatever factor is one.
    """
    for names in axis_combinations([*sizes]):
        if sum(name not in AXES for name in names) <= 1:
            yield names, math.prod(sizes[name] for name in names)


def sizes_of(evidence: Evidence) -> dict[str, float]:
    """Numbers of the layout that a forgotten or doubled division is likely to be off by."""
    return _own_sizes(evidence) | _sizes_of_others(evidence)


def _own_sizes(evidence: Evidence) -> dict[str, float]:
    others = _NOT_IN_FORWARD if evidence.key.kind in (Kind.INPUT, Kind.OUTPUT) else ()
    sizes: dict[str, float] = {a: evidence.size(a) for a in evidence.axes if a not in others}
    # A main gradient fails alone only if the activations' gradients, which show this too, pass.
    kinds = (Kind.GRAD_OUTPUT, Kind.LOSS)
    shared = evidence.share_of is not None
    # Without these axes, both runs have the same number of microbatches, and one schedule.
    differ = evidence.size("dp") * evidence.size("pp") > 1
    if evidence.microbatches > 1 and (shared or (evidence.key.kind in kinds and differ)):
        sizes["microbatches"] = evidence.microbatches
    for name, value in evidence.numbers.items():
        counts = (shared and name == "passes") or evidence.key.kind in _COUNT_IN.get(name, ())
        if value != 1 and counts:
            sizes[name] = value
    if INNER_ATTENTION in evidence.key.name and evidence.reference.ndim == 4:
        sizes[_SOFTMAX] = math.sqrt(evidence.reference.shape[-1])
    return sizes


def _sizes_of_others(evidence: Evidence) -> dict[str, float]:
    """Sizes of axes that do not divide an expert, but by which its gradient is scaled.

    Gradients are sums over all tokens, divided by the ranks that have different ones: those of the
    other layers.
    """
    if evidence.key.kind is not Kind.MAIN_GRAD:
        return {}
    others = (axis for axis in DENSE if axis not in axes_of(evidence.key.name))
    return {axis: evidence.size(axis) for axis in others if evidence.size(axis) > 1}
