# SPDX-License-Identifier: Apache-2.0
"""Places of tensors, as capture names them."""

from megatron_ttrace.trace.captured import Place
from megatron_ttrace.trace.records import STEP_LEVEL, Kind


def step_level(kind: Kind, name: str, index: int = 0) -> Place:
    """The place of a tensor that belongs to the whole step."""
    return STEP_LEVEL, kind, name, index
