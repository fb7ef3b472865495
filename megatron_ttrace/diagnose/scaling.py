# SPDX-License-Identifier: Apache-2.0
"""Hypotheses about size: all zero, off by a constant factor, sign, rounded too coarsely."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from megatron_ttrace.diagnose.evidence import Evidence, Part, axis_combinations, dot
from megatron_ttrace.mcore.roles import INNER_ATTENTION
from megatron_ttrace.trace.findings import Cause, Finding
from megatron_ttrace.trace.records import Kind

_NO_STEP = "the optimizer took no step with this parameter"
_ZERO = {
    Kind.PARAM_DELTA: ("never updated: its change is zero", "unknown to the optimizer"),
    Kind.MAIN_GRAD: ("the gradient is zero", "never accumulated"),
    Kind.EXP_AVG: ("the first moment is zero", _NO_STEP),
    Kind.EXP_AVG_SQ: ("the second moment is zero", _NO_STEP),
}
"""What is seen, and what it suggests."""
SOFTMAX = "the softmax scale"
_WORDS = {
    SOFTMAX: "the softmax scale (root of the head dim)",
    "microbatches": "the number of microbatches",
}
_COARSE = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "FP8 (E4M3)": torch.float8_e4m3fn,
    "FP8 (E5M2)": torch.float8_e5m2,
}


def zero(evidence: Evidence) -> Finding | None:
    """Every failing part is all zero, the reference is not. The repair: any value at all."""
    if not evidence.parts or any(piece.any() for part in evidence.parts for piece in part.pieces):
        return None
    text, hint = _ZERO.get(evidence.key.kind, ("all zero", ""))
    return Finding(text, Cause.ZERO, (), hint)


def factor(evidence: Evidence) -> Finding | None:
    """One constant for all failing parts. The repair: divide by it."""
    cross, size = dot((part.pieces, evidence.expected(part)) for part in evidence.parts)
    if not size or not math.isfinite(cross) or cross == 0.0:
        return None
    found = cross / size
    if not evidence.mends(lambda part: [piece / found for piece in part.pieces]):
        return None
    return describe_factor(found, evidence.tolerance.value, sizes(evidence))


def factor_per_rank(evidence: Evidence) -> Finding | None:
    """Another constant for each rank. The repair: divide each part by its own."""
    if len(evidence.parts) < 2:
        return None
    own: dict[int, float] = {}
    for part in evidence.parts:
        cross, size = dot([(part.pieces, evidence.expected(part))])
        own[part.rank] = cross / size if size else 0.0

    def divide(part: Part) -> list[torch.Tensor] | None:
        return [p / own[part.rank] for p in part.pieces] if own[part.rank] else None

    if not evidence.mends(divide):
        return None
    listed = ", ".join(f"rank {rank}: {value:.4g}" for rank, value in sorted(own.items())[:6])
    return Finding(f"each rank's part is off by a factor of its own ({listed})", Cause.FACTOR)


def rounded(evidence: Evidence) -> Finding | None:
    """The reference, rounded to a coarser dtype. The repair: do not round."""
    if evidence.tolerance.value >= 0.5:
        return None
    for name, dtype in _COARSE.items():
        if torch.finfo(dtype).eps <= 4 * evidence.tolerance.value:
            continue
        for scaled in (False, True) if dtype.itemsize == 1 else (False,):

            def off(
                part: Part, dtype: torch.dtype = dtype, scaled: bool = scaled
            ) -> list[torch.Tensor]:
                # c is round(r): the error that is left beside what rounding explains.
                return [
                    there + (piece - _round(there, dtype, scaled))
                    for piece, there in zip(part.pieces, evidence.expected(part), strict=True)
                ]

            if evidence.mends(off):
                how = " with one scale for the tensor" if scaled else ""
                text = f"precision lost: it is the reference rounded to {name}{how}"
                return Finding(text, Cause.PRECISION)
    return None


def _round(values: torch.Tensor, dtype: torch.dtype, scaled: bool) -> torch.Tensor:
    if not scaled:
        limit = torch.finfo(dtype).max
        return values.clamp(-limit, limit).to(dtype).float()
    top = values.abs().amax()
    scale = torch.finfo(dtype).max / top if top > 0 else torch.ones(())
    return (values * scale).to(dtype).float() / scale


def sizes(evidence: Evidence) -> dict[str, float]:
    """Numbers of the layout that a forgotten or doubled division is likely to be off by."""
    found: dict[str, float] = {axis: evidence.meshes[0].size(axis) for axis in evidence.axes}
    # What divides the loss by the number of microbatches shows where the backward pass begins.
    kinds = (Kind.GRAD_OUTPUT, Kind.LOSS, Kind.GRAD_NORM)
    if evidence.microbatches > 1 and evidence.key.kind in kinds:
        found["microbatches"] = evidence.microbatches
    if INNER_ATTENTION in evidence.key.name and evidence.reference.ndim == 4:
        found[SOFTMAX] = math.sqrt(evidence.reference.shape[-1])
    return found


def describe_factor(value: float, tolerance: float, layout: Mapping[str, float]) -> Finding:
    """What is said of a constant factor, and the axes whose size it is."""
    near = max(2 * tolerance, 1e-4)
    if abs(value + 1) <= near:
        return Finding("the sign is flipped", Cause.SIGN)
    cause = Cause.TOO_LARGE if abs(value) > 1 else Cause.TOO_SMALL
    size = abs(value) if abs(value) >= 1 else 1 / abs(value)
    number = f"{size:.3f}" if size < 1000 else f"{size:.4g}"
    much = f"{number} times too {'large' if abs(value) > 1 else 'small'}"
    if value < 0:
        much += " with its sign flipped"
    matches: list[tuple[str, ...]] = []
    for axes in axis_combinations(tuple(layout)):
        if matches and len(axes) > len(matches[0]):
            break
        if abs(math.prod(layout[axis] for axis in axes) / size - 1) <= near:
            matches.append(axes)
    if not matches:
        return Finding(f"{much}, a constant factor that is not a size of this layout", cause)
    names = ["·".join(axes) for axes in matches]
    said = " or ".join(_WORDS.get(name, f"the size of {name}") for name in names)
    if names == [SOFTMAX]:
        hint = f"applied {'never' if abs(value) > 1 else 'twice'}"
        return Finding(f"{much} = {said}", Cause.SOFTMAX_SCALE, (), hint)
    what = (
        "a missing division or a doubled reduction"
        if abs(value) > 1
        else "a doubled division or a missing reduction"
    )
    axes = tuple(dict.fromkeys(axis for match in matches for axis in match))
    return Finding(f"{much} = {said}", cause, axes, f"{what} over {' or '.join(names)}")
