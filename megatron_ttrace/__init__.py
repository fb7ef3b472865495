# SPDX-License-Identifier: Apache-2.0
"""TTrace for Megatron-LM: is this parallel run numerically equivalent to a single-device run?

A Megatron training script calls :func:`enable` before it imports Megatron; everything else is
flags (``--ttrace``, see ``megatron_ttrace/jobs/flags.py``). A Python program that checks such a
script calls :func:`check` (docs/api.md). Importing this package imports neither torch nor Megatron.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal imports a lot before it is there
import os
import sys

_PROGRAM = "".join(sys.argv[:1])
if (
    os.path.basename(_PROGRAM) == "ttrace" or (_PROGRAM == "-m" and __name__ in sys.orig_argv)
) and _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    # Until ``cli/main.py`` handles it, Ctrl-C ends our command without a traceback.
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

from types import ModuleType  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

if TYPE_CHECKING:
    from megatron_ttrace.run.own_loop import is_reference, step
    from megatron_ttrace.saved.api import Report, check, compare, load_report
    from megatron_ttrace.trace.errors import TTraceError
    from megatron_ttrace.trace.records import Culprit, Kind, Outcome, Result, Summary, Verdict
    from megatron_ttrace.trace.version import __version__

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
    "is_reference",
    "load_report",
    "step",
]

_HOMES = {
    "megatron_ttrace.trace.version": ("__version__",),
    "megatron_ttrace.trace.errors": ("TTraceError",),
    "megatron_ttrace.saved.api": ("Report", "check", "compare", "load_report"),
    "megatron_ttrace.run.own_loop": ("is_reference", "step"),
    "megatron_ttrace.trace.records": (
        "Culprit",
        "Kind",
        "Outcome",
        "Result",
        "Summary",
        "Verdict",
    ),
}
"""Public names by the module that defines them; imported when first used."""

_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Files of the drivers of accelerators: NVIDIA's, AMD's, and those of WSL 2."""


def enable() -> None:
    """Add the ``--ttrace`` flags to this training script, and let Megatron run without a GPU.

    Call it before Megatron is imported. With an accelerator and none of our flags on the command
    line it does nothing, and imports neither torch nor Megatron. Without an accelerator the CPU
    backend is activated; the training loop is changed by ``--ttrace`` only.
    """
    if not _is_off():
        from megatron_ttrace.run import entry

        entry.enable()


def _is_off() -> bool:
    """Whether there is nothing to do, as far as can be told without importing torch."""
    asked = any(word.startswith(("--ttrace", "-h", "--help")) for word in sys.argv[1:])
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    return not asked and not hidden and any(map(os.path.exists, _DEVICES))


def __getattr__(name: str) -> Any:
    """A public name, imported on demand."""
    import importlib

    for home, names in _HOMES.items():
        if name in names:
            found = globals()[name] = getattr(importlib.import_module(home), name)
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Package(ModuleType):
    """``compare`` is both a function of this package and a subpackage.

    Importing a submodule binds its name in the package. ``megatron_ttrace.compare`` stays the
    function; the subpackage is imported with ``from megatron_ttrace.compare import ...``.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    """The public names, for completion."""
    return sorted({*globals(), *__all__})
