# SPDX-License-Identifier: Apache-2.0
"""Training loops on megatron-core, and the one that this process runs."""

from __future__ import annotations

from megatron_ttrace.mcore.fronts.front import Front
from megatron_ttrace.mcore.fronts.megatron_lm import MegatronLM

_fronts: list[Front] = [MegatronLM()]


def use(front: Front) -> None:
    """Make a front the one of this process; until then it is Megatron-LM's."""
    _fronts[:] = [front]


def current() -> Front:
    """The front of this process."""
    return _fronts[0]
