# SPDX-License-Identifier: Apache-2.0
"""The one point at which a fault is put into the run under test (``--ttrace-bug``).

It happens on the candidate's ranks only, never in a reference run, after Megatron has parsed its
arguments and before it builds anything. Nothing else here knows of faults.
"""

import pkgutil

_PUTS_IN = "megatron_ttrace.evaluation.bugs.patching:introduce"
"""By name: the known bugs are in a room above this one."""


def put_in(name: str) -> None:
    """Put the named fault into this process.

    Raises:
        TTraceError: when there is no fault of this name, or this Megatron lacks its code.
    """
    pkgutil.resolve_name(_PUTS_IN)(name)
