# SPDX-License-Identifier: Apache-2.0
"""Hypotheses about a linear layer's product: its size is wrong, and its bias is right.

``y = x Wᵀ + b``. A scale that was lost on the way into the product (that of a cast to FP8, above
all) changes the first term and leaves the second.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping

import torch

from megatron_ttrace.diagnose.evidence import Evidence, Part, dot
from megatron_ttrace.diagnose.sources import normed
from megatron_ttrace.trace.findings import Cause, Finding
from megatron_ttrace.trace.records import STEP_LEVEL, Kind, TraceKey

_FORMATS = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}
_LOST = "the scale was undone and never applied: what was cast is not what was multiplied"
_KEPT = "the scale was applied and never undone"
_ALL, _OWN = "its input", "its own part of the sequence"
_EQUAL = 1e-4
"""Below what one step of bf16 in the largest value would make."""


def cast(evidence: Evidence) -> Finding | None:
    """A product's factor is the scale of a cast to FP8. The repair: scale it back, not the bias."""
    own = _factors(evidence)
    words, hint = _cast(evidence, own) if own else ("", "")
    return Finding(_said(evidence, own, words), Cause.CAST, (), hint) if words else None


def factor(evidence: Evidence) -> Finding | None:
    """Each rank's product is off by a factor. The repair: divide by it, and leave the bias.

    Without a bias, hypotheses about the whole tensor say it better.
    """
    own = _factors(evidence) if _bias(evidence) is not None else {}
    return Finding(_said(evidence, own, ""), Cause.FACTOR) if own else None


def _said(evidence: Evidence, own: Mapping[int, float], more: str) -> str:
    listed = ", ".join(f"rank {rank}: {value:.4g}" for rank, value in sorted(own.items())[:6])
    right = ", its bias is right" if _bias(evidence) is not None else ""
    return f"the product is off by a factor ({listed}){right}{more}"


def _factors(evidence: Evidence) -> dict[int, float]:
    """What each failing rank's product is multiplied with; empty when that does not mend it."""
    if evidence.key.kind is not Kind.OUTPUT:
        return {}
    bias = _bias(evidence)
    own: dict[int, float] = {}
    for part in evidence.parts:
        added = _added(part, bias)
        ours = [p - b for p, b in zip(part.pieces, added, strict=True)]
        theirs = [r - b for r, b in zip(evidence.expected(part), added, strict=True)]
        cross, size = dot([(ours, theirs)])
        if not size or not cross:
            return {}
        own[part.rank] = cross / size

    def divide(part: Part) -> list[torch.Tensor]:
        pairs = zip(part.pieces, _added(part, bias), strict=True)
        return [(piece - b) / own[part.rank] + b for piece, b in pairs]

    return own if evidence.mends(divide) else {}


def _bias(evidence: Evidence) -> torch.Tensor | None:
    name = evidence.key.name.split("#")[0]
    key = TraceKey(evidence.key.iteration, STEP_LEVEL, Kind.PARAM, f"{name}.bias", 0)
    bias = evidence.whole(key)
    if bias is None or bias.shape != evidence.reference.shape[-1:]:
        return None
    return bias.float()


def _added(part: Part, bias: torch.Tensor | None) -> list[torch.Tensor]:
    """What the bias adds to each piece of a part."""
    if bias is None:
        return [torch.zeros(()) for _ in part.pieces]
    return [
        bias.narrow(0, box.logical[-1], piece.shape[-1])
        for box, piece in zip(part.boxes, part.pieces, strict=True)
    ]


def _cast(evidence: Evidence, own: Mapping[int, float]) -> tuple[str, str]:
    """Words and a hint, when each rank's factor is the scale of a cast of what it multiplies.

    With sequence parallelism a rank holds a part of the sequence and multiplies all of it.
    """
    key = evidence.key
    fed = evidence.whole(dataclasses.replace(key, kind=Kind.INPUT, index=0))
    if fed is None or fed.ndim < 2:
        return "", ""
    # What was cast was of the run's precision.
    rows = normed(evidence, key.name.split("#")[0], fed.float()).view(fed.shape).to(fed.dtype)
    size = evidence.meshes[0].size("tp") if evidence.meshes else 1
    wholes = {_ALL: dict.fromkeys(own, rows)}
    if size > 1 and len(rows) % size == 0:
        chunks = rows.chunk(size)
        wholes[_OWN] = {rank: chunks[evidence.meshes[rank].at("tp")] for rank in own}
    found: list[tuple[float, str, str, str]] = []
    for (what, held), (name, dtype) in itertools.product(wholes.items(), _FORMATS.items()):
        tops = {rank: float(tensor.abs().amax()) for rank, tensor in held.items()}
        if not all(tops.values()):
            continue
        scales = {rank: torch.finfo(dtype).max / top for rank, top in tops.items()}
        for how, hint, ratios in (
            ("the inverse of ", _LOST, [own[rank] * scale for rank, scale in scales.items()]),
            ("", _KEPT, [own[rank] / scale for rank, scale in scales.items()]),
        ):
            off = max(abs(ratio - 1) for ratio in ratios)
            found.append((off, what, f"{how}the scale of a cast to FP8 ({name})", hint))
    off, what, done, hint = min(found, default=(math.inf, "", "", ""))
    if off > max(evidence.tolerance.value, 1e-3):
        return "", ""
    # Each part's largest value can be that of the whole.
    equal = {its for its_off, its, same, _ in found if same == done and its_off - off < _EQUAL}
    if equal == {_ALL, _OWN}:
        return f": that is {done} of {_OWN}; or of {_ALL}, whose scale is the same here", hint
    return f": that is {done} of {what}", hint
