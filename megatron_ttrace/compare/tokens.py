# SPDX-License-Identifier: Apache-2.0
"""Which microbatch of the reference is this one? Its tokens tell.

Megatron's sampler deals the samples of a global batch to data-parallel ranks in turn, so rank r's
j-th microbatch should be number ``j * dp + r``. That is not relied on, because the sampler may have
a bug.
"""

from collections.abc import Sequence

import torch

from megatron_ttrace.trace.captured import Batch
from megatron_ttrace.trace.records import Kind, TraceKey
from megatron_ttrace.trace.store import TraceReader

PRIMARY = "tokens"


def match(
    batches: Sequence[Batch], reference: TraceReader, iteration: int, dp: int, dp_rank: int
) -> list[int]:
    """The reference's number of each local microbatch.

    A microbatch that the reference does not have keeps the number that the sampler should have
    given it; comparing its tokens then fails.
    """
    total = len(batches) * dp
    numbers: list[int] = []
    for local, batch in enumerate(batches):
        expected = local * dp + dp_rank
        order = [expected, *(n for n in range(total) if n != expected)]
        numbers.append(
            next(
                (n for n in order if n not in numbers and _same(batch, reference, iteration, n)),
                expected,
            )
        )
    return numbers


def _same(batch: Batch, reference: TraceReader, iteration: int, number: int) -> bool:
    name = PRIMARY if PRIMARY in batch else next(iter(batch), None)
    if name is None:
        return True
    key = TraceKey(iteration, number, Kind.TOKENS, name, 0)
    if key not in reference:
        return False
    there = reference.data(key)
    return batch[name].shape == there.shape and bool(torch.equal(batch[name].cpu(), there))
