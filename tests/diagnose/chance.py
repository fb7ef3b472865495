# SPDX-License-Identifier: Apache-2.0
"""Random faults that no composition of repairs explains, on random tensors of random jobs."""

import dataclasses
import random
from collections.abc import Callable, Iterator

import torch

from megatron_ttrace.diagnose.evidence import Evidence
from megatron_ttrace.placement.placements import Shard
from megatron_ttrace.placement.plan import Step
from megatron_ttrace.trace.findings import Cause, Finding, OtherTensor, OtherTime
from megatron_ttrace.trace.records import Kind, TraceKey
from tests.diagnose.evidence_by_hand import OUTPUT, WEIGHT, evidence_of, meshes, products, values

LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 3), (4, 2, 1), (2, 2, 2)]
"""Sizes of tp, cp, dp."""
SHAPES = [
    *[(), (2,), (4,), (6,), (12,), (24,), (64,)],
    *[(4, 4), (12, 12), (24, 24), (8, 2, 12), (96, 8)],
]
TOLERANCES = (1e-6, 1e-4, 1e-3, 1e-2, 0.1, 0.4)
KINDS = (Kind.MAIN_GRAD, Kind.PARAM_DELTA, Kind.OUTPUT, Kind.GRAD_INPUT, Kind.GRAD_OUTPUT)
SCALARS = (Kind.GRAD_NORM, Kind.METRIC, Kind.LOSS)
NUMBERS = {"tokens": 63.0, "step_tokens": 252.0, "clipping": 5.3, "layers": 6.0, "z": 1e-3}

Fault = Callable[[torch.Tensor, int], torch.Tensor]
"""What stands there instead of right values of the size one, by a seed."""


def like(right: torch.Tensor, seed: int) -> torch.Tensor:
    """Other normal values of the same shape."""
    return values(*right.shape, seed=seed)


def low_rank(right: torch.Tensor, seed: int) -> torch.Tensor:
    """An error that is alike in all rows."""
    if right.ndim < 2:
        return right + like(right, seed)
    column = values(right.shape[0], seed=seed).view(-1, *[1] * (right.ndim - 1))
    return right + column * values(*right.shape[1:], seed=seed + 1)


def smooth(right: torch.Tensor, _: int) -> torch.Tensor:
    """Each element mixed with its neighbour."""
    return (0.6 * right + 0.4 * right.roll(1, -1)) * 1.23 if right.ndim else right


FAULTS: dict[str, Fault] = {
    "noise": lambda right, seed: right + like(right, seed),
    "a little noise": lambda right, seed: right + 0.03 * like(right, seed),
    "other values": like,
    "positive values": lambda right, seed: like(right, seed).exp(),
    "element by element": lambda right, seed: right * like(right, seed).exp(),
    "squared": lambda right, seed: right * right.abs() * (1 + 0.1 * (seed % 10)),
    "saturated": lambda right, seed: (right * (1.1 + 0.1 * (seed % 10))).tanh(),
    "some": lambda right, seed: torch.where(like(right, seed) > 1.3, like(right, seed + 1), right),
    "low rank": low_rank,
    "smooth": smooth,
    "mixed": lambda right, seed: 0.63 * right + 0.77 * like(right, seed),
}


def reference_of(rng: random.Random, shape: tuple[int, ...]) -> torch.Tensor:
    """Normal values, values around one, one value, two, few that are not zero, rows alike."""
    seed = rng.randrange(1 << 30)
    plain = values(*shape, seed=seed)
    match rng.randrange(7):
        case 0:
            return 1 + 0.05 * plain
        case 1:
            return torch.full(shape, 0.37)
        case 2:
            return plain.sign() * 0.1
        case 3:
            rows = values(*shape[:1], seed=seed + 1) > 0.8
            return plain * rows.view(-1, *[1] * (len(shape) - 1)) if shape else plain
        case 4 if len(shape) > 1:
            return plain[:1].expand(shape) + 0.01 * plain
    return plain


@dataclasses.dataclass(frozen=True)
class Case:
    """A failed tensor, and the name of its fault."""

    evidence: Evidence
    fault: str


def case(number: int) -> Case:
    """The failed tensor with a number."""
    rng = random.Random(number)
    tp, cp, dp = rng.choice(LAYOUTS)
    ranks = meshes(tp * cp * dp, tp=tp, cp=cp)
    shape = rng.choice(SHAPES)
    kind = rng.choice(KINDS if shape else SCALARS)
    of_parameter = kind in (*SCALARS, Kind.MAIN_GRAD, Kind.PARAM_DELTA)
    key = dataclasses.replace(WEIGHT if of_parameter else OUTPUT, kind=kind)
    trace = {TraceKey(1, at, kind, key.name, 0): reference_of(rng, shape) for at in range(1, 4)}
    trace |= {
        TraceKey(1, 0, kind, f"decoder.layers.{at}", 0): reference_of(rng, shape) for at in range(8)
    }
    others = [*trace]
    if kind is Kind.MAIN_GRAD and len(shape) == 2:
        trace |= linear(rng, key.name.removesuffix(".weight"), shape)
        reference = torch.stack(products(trace)).sum(0)
    else:
        reference = reference_of(rng, shape)
    sharded = bool(shape) and shape[0] % tp == 0 and rng.random() < 0.5
    fault, alike = rng.choice([*FAULTS]), rng.random() < 0.7
    share, seed = rng.choice((1.0, 1.0, 10 ** rng.uniform(-2, 0))), rng.randrange(1 << 30)
    size = float(reference.square().mean().sqrt()) or 1.0

    def wrong(right: torch.Tensor, seed: int) -> torch.Tensor:
        return right + share * (size * FAULTS[fault](right / size, seed) - right)

    def held(rank: int) -> torch.Tensor:
        # What is wrong may be alike on all ranks, or not.
        whole = wrong(reference, seed if alike else seed + 7 * rank)
        return whole.chunk(tp)[ranks[rank].at("tp")] if sharded else whole

    def candidates() -> Iterator[tuple[Finding, TraceKey]]:
        for other in others:
            if other.name == key.name:
                yield OtherTime(Cause.OTHER_TIME, microbatch=other.microbatch), other
            else:
                yield OtherTensor(Cause.OTHER_MODULE, kind=kind.value, name=other.name), other

    evidence = evidence_of(
        reference,
        ranks,
        {mesh.rank: held(mesh.rank) for mesh in ranks},
        placement=(Step("tp", Shard(0)),) if sharded else (),
        key=key,
        tolerance=rng.choice(TOLERANCES),
        trace=trace,
        microbatches=rng.choice((1, 2, 4)),
        others=candidates,
        numbers=NUMBERS,
    )
    return Case(evidence, fault)


def linear(rng: random.Random, module: str, shape: tuple[int, ...]) -> dict[TraceKey, torch.Tensor]:
    """What a linear layer's gradient is made of."""
    tensors = {}
    for microbatch in range(rng.choice((1, 2, 4))):
        seed = rng.randrange(1 << 30)
        for kind, width in ((Kind.GRAD_OUTPUT, shape[0]), (Kind.INPUT, shape[1])):
            seed += 1
            tensors[TraceKey(1, microbatch, kind, module, 0)] = values(5, 2, width, seed=seed)
    return tensors
