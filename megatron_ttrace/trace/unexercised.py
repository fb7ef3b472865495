# SPDX-License-Identifier: Apache-2.0
"""The record of features that a check does not cover: they had no effect in the traced steps."""

from __future__ import annotations

import dataclasses
from enum import StrEnum


class Unexercised(StrEnum):
    """A feature that the job requests and that had no effect in the traced steps."""

    ONE_RANK = "one_rank"
    SCHEDULE = "schedule"
    DIFFERENT_DATA = "different_data"
    SHARDED_OPTIMIZER = "sharded_optimizer"
    BUCKETS = "buckets"
    DROPOUT = "dropout"
    RANDOM_ROUTING = "random_routing"
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
    """A feature that passes whether it is right or wrong.

    ``value`` is what was measured of it and ``limit`` what that is to be compared with, where there
    are such numbers (docs/flags-and-files.md); ``names`` are the modules or parameters concerned.
    """

    what: Unexercised
    value: float | None = None
    limit: float | None = None
    names: tuple[str, ...] = ()
