# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's operation fuser: its names, and none of its operations.

Megatron names two of these classes in annotations that Python evaluates when Megatron's
wrappers are defined, whatever the options. ``cpu/arguments.py`` keeps runs from using them;
operations that are looked for by name (``from ...ops import GroupedLinear``) are not found.
"""

from typing import Any

from megatron_ttrace.trace.errors import TTraceError


class FusibleOperation:
    """One operation of the fuser.

    Raises:
        TTraceError: when one is to be made.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise TTraceError("TransformerEngine's operation fuser is not emulated on a CPU")


class Sequential(FusibleOperation):
    """A chain of operations."""
