# SPDX-License-Identifier: Apache-2.0
"""What functions were given and returned against the reference, by norms.

Norms tell little of a tensor, but need no placement: if each rank has a part of a tensor, their
squared norms add up to its own.
"""

import contextlib
import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from megatron_ttrace.trace import codec
from megatron_ttrace.trace.collectives import Agreement, CallNorms, Compared, Norm, Phase, pattern
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.store import TraceReader, atomic_write

FILE = "calls.jsonl"
"""Of a reference: a line for each call."""
_APART = 0.02
"""How far apart norms may be: of a tensor in 16 bits rounding moves it by less."""
_SUMMAND = 0.5, 1.5
"""Between which norms a rank's summand of a tensor is: in shares of one rank's, and of the whole.
Summands may add up, or cancel each other."""


def write_calls(directory: Path, calls: Iterable[CallNorms]) -> None:
    """Write ``calls.jsonl`` of a reference."""
    lines = (f"{json.dumps(codec.encode(call))}\n" for call in calls)
    atomic_write(directory / FILE, "".join(lines))


def read_calls(reference: TraceReader, wanted: Collection[tuple[str, str]]) -> list[CallNorms]:
    """The calls of some functions in some modules; fewer if the file is damaged, or absent.

    A large model has thousands, which are read only where a place is looked for.
    """
    calls: list[CallNorms] = []
    with contextlib.suppress(OSError, TTraceError, ValueError, LookupError, TypeError):
        reference.verify(FILE)
        for line in codec.lines(reference.directory / FILE, json.loads):
            if (line["function"], line["module"]) in wanted:
                calls.append(codec.decode(CallNorms, line))
    return calls


def agreements(
    ranks: Iterable[tuple[int, Sequence[CallNorms]]],
    reference: Iterable[CallNorms],
    sizes: Sequence[int],
    factor: float = 1.0,
) -> tuple[Compared, ...]:
    """Each function's agreement in modules of a sort, where one is known.

    Args:
        ranks: the pipeline stage of each, and what was called there, in its first microbatch, which
            is the reference's as well.
        reference: what was called there.
        sizes: of the axes over which ranks may have summands of a tensor.
        factor: expected candidate/reference ratio of gradients.
    """
    ours: defaultdict[tuple[str, str, Phase], list[CallNorms]] = defaultdict(list)
    stages: defaultdict[tuple[str, str, Phase], set[int]] = defaultdict(set)
    for stage, calls in ranks:
        for call in calls:
            ours[key := (call.function, call.module, call.phase)].append(call)
            stages[key].add(stage)
    compared: dict[tuple[str, str, Phase], Agreement] = {}
    for other in reference:
        key = other.function, other.module, other.phase
        # Of a module on several stages, the first call on each is not the same.
        calls = ours[key] if len(stages[key]) == 1 else []
        factors = {1.0, abs(factor)} if other.phase is Phase.BACKWARD else {1.0}
        given = [*_alike([call.given for call in calls], other.given, factors, sizes)]
        returned = [*_alike([call.returned for call in calls], other.returned, factors, sizes)]
        if (agreement := _agreement(given, returned)) is not None:
            compared.setdefault((other.function, pattern(other.module), other.phase), agreement)
    return tuple(Compared(*key, agreement=agreement) for key, agreement in compared.items())


def _agreement(given: Sequence[bool | None], returned: Sequence[bool | None]) -> Agreement | None:
    if False in given:
        return Agreement.GIVEN_OTHER
    if False in returned:
        return Agreement.STRAYS if True in given else Agreement.RETURNED_OTHER
    return Agreement.ALIKE if {*returned} == {True} else None


def _alike(
    ranks: Sequence[Sequence[Norm]],
    reference: Sequence[Norm],
    factors: Collection[float],
    sizes: Sequence[int],
) -> Iterator[bool | None]:
    """Whether each tensor has the reference's norm; ``None`` where that is not known."""
    if not ranks or any(len(norms) != len(reference) for norms in ranks):
        return
    for *ours, other in zip(*ranks, reference, strict=True):
        answers = {_fits(ours, other, factor, sizes) for factor in factors}
        yield True if True in answers else None if None in answers else False


def _fits(ours: Sequence[Norm], other: Norm, factor: float, sizes: Sequence[int]) -> bool | None:
    """``ours``: of the same tensor on some ranks, of which each part is on as many."""
    if not math.isfinite(other.norm) or len({own.elements for own in ours}) > 1:
        return None
    if not all(math.isfinite(own.norm) for own in ours):
        return False
    parts, left = divmod(other.elements, ours[0].elements)
    if left or not parts:
        return None
    norms = [own.norm for own in ours]
    if parts > 1:
        norms = [math.sqrt(sum(norm * norm for norm in norms) / len(norms) * parts)]
    if not other.norm or not all(norms):
        return {*norms} == {other.norm}
    ratios = [norm / other.norm / factor for norm in norms]
    if all(abs(ratio - 1) <= _APART for ratio in ratios):
        return True
    least = _SUMMAND[0] / max(sizes, default=1)
    is_summand = all(least <= ratio <= _SUMMAND[1] for ratio in ratios)
    # What all axes divide is no summand. Numbers are judged as what they are (diagnose/code.py).
    is_open = other.elements == 1 or (is_summand and parts < math.prod(sizes))
    return None if is_open else False
