# SPDX-License-Identifier: Apache-2.0
"""TTrace for Megatron-LM: is this parallel run numerically the single-device run?

A Megatron training script calls :func:`enable` before it imports Megatron; everything else is
flags (``--ttrace``, see ``megatron_ttrace/mcore/flags.py``).
"""

from types import ModuleType

__version__ = "0.1.0"

__all__ = ["__version__", "enable"]


def enable() -> None:
    """Teach this training script the ``--ttrace`` flags, and Megatron to run without a GPU.

    Call it before anything of Megatron is imported. Without ``--ttrace`` nothing of the training
    loop is touched; without an accelerator the CPU backend switches itself on.
    """
    _entry().enable()


def _entry() -> ModuleType:
    """The room that runs checks: the one place from which it is reached from above it."""
    from megatron_ttrace.runtime import entry, injection

    injection.offer(_known_bug)
    return entry


def _known_bug(name: str) -> None:
    """What ``--ttrace-bug`` does: this package's known bugs, put in where a run lets them."""
    from megatron_ttrace.evaluation.bugs import patching

    patching.introduce(name)
