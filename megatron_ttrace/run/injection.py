# SPDX-License-Identifier: Apache-2.0
"""The one point at which a fault is put into the run under test.

The runtime knows no faults. ``enable()`` offers a function that puts one in by its name. It is
called on the candidate's ranks only, never in a reference run, after Megatron has parsed its
arguments and before it builds anything.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_ttrace.trace.errors import TTraceError

_offered: list[Callable[[str], None]] = []


def offer(put_in: Callable[[str], None]) -> None:
    """Register how a fault is put into this process; the last offer counts."""
    _offered[:] = [put_in]


def put_in(name: str) -> None:
    """Put the named fault into this process.

    Raises:
        TTraceError: when no function was offered, or it does not know the name.
    """
    if not _offered:
        raise TTraceError(f"--ttrace-bug {name}: call megatron_ttrace.enable() in the script first")
    _offered[0](name)
