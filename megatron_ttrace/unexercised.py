# SPDX-License-Identifier: Apache-2.0
"""The record of what a check says nothing about, because it did not act in the traced steps."""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from typing import Any, Self


class Unexercised(StrEnum):
    """Something that the job asks for and that did not act in the traced steps."""

    ONE_RANK = "one_rank"
    SCHEDULE = "schedule"
    DIFFERENT_DATA = "different_data"
    SHARDED_OPTIMIZER = "sharded_optimizer"
    BUCKETS = "buckets"
    DROPOUT = "dropout"
    LOSS_MASK = "loss_mask"
    POSITION_RESET = "position_reset"
    ATTENTION_RESET = "attention_reset"
    TOKEN_WEIGHTS = "token_weights"  # noqa: S105 - tokens of text
    WINDOW = "window"
    SPARSE_ATTENTION = "sparse_attention"
    RAMP_UP = "ramp_up"
    IDLE_EXPERTS = "idle_experts"
    CAPACITY = "capacity"
    CLIP = "clip"
    GRADIENTS = "gradients"
    UPDATE = "update"
    UNCHECKED = "unchecked"


@dataclasses.dataclass(frozen=True, slots=True)
class NotExercised:
    """One thing that passes whether it is right or wrong.

    ``value`` is what was measured of it and ``limit`` what that is to be compared with, where there
    are such numbers (docs/flags-and-files.md); ``names`` are the modules or parameters concerned.
    """

    what: Unexercised
    value: float | None = None
    limit: float | None = None
    names: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A JSON object for ``summary.json``."""
        return {
            "what": self.what.value,
            "value": self.value,
            "limit": self.limit,
            "names": list(self.names),
        }

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """The inverse of :meth:`to_json`.

        Raises:
            ValueError: on anything that :meth:`to_json` does not write.
        """
        if not isinstance(data, dict):
            raise ValueError(f"not an object: {data!r:.40}")
        names = data.get("names", [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"names is no list of strings: {names!r:.40}")
        value, limit = _number(data.get("value")), _number(data.get("limit"))
        return cls(Unexercised(str(data.get("what"))), value, limit, tuple(names))


_LARGEST = 1e300


def _number(value: Any) -> float | None:
    if value is None:
        return None
    if type(value) not in (int, float) or not abs(value) <= _LARGEST:
        raise ValueError(f"not a finite number: {value!r:.40}")
    return float(value)
