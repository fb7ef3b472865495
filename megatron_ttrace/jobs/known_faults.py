# SPDX-License-Identifier: Apache-2.0
"""Which jobs combine what docs/findings.md proves to be faulty in Megatron (``known_faults.toml``).

This only labels a divergence; it changes no verdict.
"""

import dataclasses
import fnmatch
import functools
import math
import re
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path

from megatron_ttrace.trace import codec
from megatron_ttrace.trace.outcomes import Unexercised

type Options = Mapping[str, object]
"""A job's options: as they are when it runs, or as a command sets them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """What a job combines that shows a fault of Megatron's.

    Attributes:
        heading: the beginning of its heading in docs/findings.md, without the number.
        given: what options of the job are: a pattern (fnmatch); as ``2+``, at least 2; ``*``, set;
            empty, not set. Fields of Megatron-Bridge are called ``section.field``.
            ``expert_data_parallel_size`` is how many ranks have the same experts, of those that
            share an instance of the optimizer.
        absent: what they are not.
        larger: two sizes (1 if not given), of which the first is larger.
        fixed: the series of Megatron that does not have the fault any more.
    """

    heading: str
    given: dict[str, str]
    absent: dict[str, str] = dataclasses.field(default_factory=dict)
    larger: tuple[str, str] | None = None
    fixed: tuple[int, ...] = ()

    def fits(self, options: Options) -> bool:
        """Whether the job has what it takes."""
        if self.larger is not None:
            large, small = (_integer(options.get(option)) or 1 for option in self.larger)
            if large <= small:
                return False
        return all(_is(options.get(o), wanted) for o, wanted in self.given.items()) and not any(
            _is(options.get(o), wanted) for o, wanted in self.absent.items()
        )


def _is(value: object, wanted: str) -> bool:
    if wanted in ("", "*"):
        return bool(value) is bool(wanted)
    if wanted.endswith("+"):
        return _integer(value) >= int(wanted[:-1])
    return value is not None and fnmatch.fnmatchcase(str(value), wanted)


def _integer(value: object) -> int:
    """0 for texts that are not numbers."""
    text = str(value)
    return int(text) if text.isdecimal() and text.isascii() else 0


@functools.cache
def findings() -> tuple[Finding, ...]:
    """All of them."""
    text = Path(__file__).with_name("known_faults.toml").read_text(encoding="utf-8")
    return codec.decode(tuple[Finding, ...], tomllib.loads(text)["finding"])


def finding_of(options: Options, megatron: str, idle: Collection[Unexercised] = ()) -> str:
    """The heading of the finding that a diverging job may show; empty if it is a new one.

    ``options`` are the job's, validated; ``megatron`` is the version of its Megatron. What is
    ``idle`` had no effect in the traced steps.
    """
    if Unexercised.LOSS_MASK in idle:
        options = {**options, "eod_mask_loss": False}
    axes = ("data_parallel_size", "tensor_model_parallel_size", "context_parallel_size")
    ranks = math.prod(_integer(options.get(axis)) or 1 for axis in axes)
    divided = (
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "num_distributed_optimizer_instances",
    )
    parts = math.prod(_integer(options.get(axis)) or 1 for axis in divided)
    options = {**options, "expert_data_parallel_size": ranks // parts}
    series = tuple(int(part) for part in re.findall(r"\d+", megatron)[:2])
    for finding in findings():
        if finding.fits(options) and not (finding.fixed and series >= finding.fixed):
            return finding.heading
    return ""
