# SPDX-License-Identifier: Apache-2.0
"""TTrace for Megatron-LM: is this parallel run numerically the single-device run?

A Megatron training script calls :func:`enable` before it imports Megatron; everything else is
flags (``--ttrace``, see ``megatron_ttrace/mcore/flags.py``). A Python program that checks such a
script calls :func:`check` (docs/api.md). Importing this package imports neither torch nor Megatron.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_ttrace.errors import TTraceError
    from megatron_ttrace.runtime.api import Report, check, compare, load_report
    from megatron_ttrace.trace.records import Culprit, Kind, Outcome, Result, Summary, Verdict

__version__ = "0.1.0"

__all__ = [
    "Culprit",
    "Kind",
    "Outcome",
    "Report",
    "Result",
    "Summary",
    "TTraceError",
    "Verdict",
    "__version__",
    "check",
    "compare",
    "enable",
    "load_report",
]

_HOMES = {
    "megatron_ttrace.errors": ("TTraceError",),
    "megatron_ttrace.runtime.api": ("Report", "check", "compare", "load_report"),
    "megatron_ttrace.trace.records": (
        "Culprit",
        "Kind",
        "Outcome",
        "Result",
        "Summary",
        "Verdict",
    ),
}
"""Where each public name is defined. It is imported when it is first used."""


def enable() -> None:
    """Teach this training script the ``--ttrace`` flags, and Megatron to run without a GPU.

    Call it before anything of Megatron is imported. Without ``--ttrace`` nothing of the training
    loop is touched; without an accelerator the CPU backend switches itself on.
    """
    _entry().enable()


def __getattr__(name: str) -> Any:
    """A public name from its home."""
    import importlib

    for home, names in _HOMES.items():
        if name in names:
            found = globals()[name] = getattr(importlib.import_module(home), name)
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Package(ModuleType):
    """``compare`` is a function of this package, and the name of a room in it.

    Importing a module binds its name in the package that holds it. What is public keeps its name:
    ``megatron_ttrace.compare`` is the function. The room is imported as every other one, with
    ``from megatron_ttrace.compare import ...``.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    """The public names, for completion."""
    return sorted({*globals(), *__all__})


def _entry() -> ModuleType:
    """The room that runs checks: the one place from which it is reached from above it."""
    from megatron_ttrace.runtime import entry, injection

    injection.offer(_known_bug)
    return entry


def _known_bug(name: str) -> None:
    """What ``--ttrace-bug`` does: this package's known bugs, put in where a run lets them."""
    from megatron_ttrace.evaluation.bugs import patching

    patching.introduce(name)
