# SPDX-License-Identifier: Apache-2.0
"""Training loops on megatron-core, and the one that this process runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # reading a report needs no torch
    from megatron_ttrace.mcore.fronts.front import Front

_fronts: list[Front] = []


def use(front: Front) -> None:
    """Make a front the one of this process; until then it is Megatron-LM's."""
    _fronts[:] = [front]


def current() -> Front:
    """The front of this process."""
    if not _fronts:
        from megatron_ttrace.mcore.fronts.megatron_lm import MegatronLM

        use(MegatronLM())
    return _fronts[0]
