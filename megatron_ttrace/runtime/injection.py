# SPDX-License-Identifier: Apache-2.0
"""The one point at which a fault is put into the run under test.

A run knows of no fault. Whoever enables the checker offers a function that puts one in by its name;
it is called on the candidate's ranks only, after Megatron parsed its arguments and before it builds
anything. The reference is never asked.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_ttrace.errors import TTraceError

_offered: list[Callable[[str], None]] = []


def offer(put_in: Callable[[str], None]) -> None:
    """Say how a fault is put into this process; the last offer counts."""
    _offered[:] = [put_in]


def put_in(name: str) -> None:
    """Put the named fault into this process.

    Raises:
        TTraceError: when nothing was offered, or what was offered does not know the name.
    """
    if not _offered:
        raise TTraceError(f"--ttrace-bug {name}: call megatron_ttrace.enable() in the script first")
    _offered[0](name)
