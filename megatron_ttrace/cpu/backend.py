# SPDX-License-Identifier: Apache-2.0
"""Deciding whether the CPU backend is needed, and switching it on."""

import os
import sys
from typing import Any

from megatron_ttrace.cpu import te
from megatron_ttrace.trace.errors import TTraceError

_active = False


def needed(device: str = "auto") -> bool:
    """Say whether a run on ``device`` ("auto", "cpu" or "cuda") has to use the CPU backend."""
    if device == "cpu" or _active:
        return True
    if device != "auto":
        return False
    import torch

    return not torch.cuda.is_available()


def active() -> bool:
    """Say whether :func:`activate` has run in this process or the one it was forked from."""
    return _active


def _compile_nothing() -> None:
    """Compiling would need a C++ toolchain and reorders floating-point operations."""
    # Read by torch._dynamo when it is imported.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.config.disable = True
    import torch

    # With dynamo disabled it returns functions as they are too, but first imports the whole
    # compiler: more than half a second for a decorator of Megatron's that does nothing.
    torch.compile = _compile
    torch._disable_dynamo = _disable_dynamo  # type: ignore[attr-defined]
    for method in vars(torch.optim.Optimizer).values():
        if plain := getattr(method, "__wrapped__", None):
            plain.__dynamo_disable = plain  # where it looks for what that returned


def _compile(model: Any = None, **options: Any) -> Any:
    """Stands for ``torch.compile``: the function as it is, or a decorator that returns it.

    PyTorch's FlexAttention, which nobody uses uncompiled, has no backward pass on a CPU: ours does.
    """
    del options
    if model is getattr(sys.modules.get("torch.nn.attention.flex_attention"), "flex_attention", 0):
        from megatron_ttrace.cpu.operators.flex_attention import flex_attention as model
    return (lambda decorated: decorated) if model is None else model


def _disable_dynamo(fn: Any = None, recursive: bool = True) -> Any:
    """Stands for the opposite, likewise."""
    del recursive
    return _compile(fn)


def activate() -> None:
    """Install all substitutions; a second call does nothing.

    Megatron copies some of what is replaced here on import (``from torch.cuda import _lazy_call``,
    ``except ImportError`` around Apex), so this has to come first. No thread, process group or
    random state is created: a process may activate, then fork its ranks.
    """
    global _active
    if _active:
        te.install()  # refuses another release of TransformerEngine
        return
    if any(name == "megatron.core" or name.startswith("megatron.core.") for name in sys.modules):
        raise TTraceError(
            "megatron is already imported: call megatron_ttrace.enable() before importing megatron"
        )
    _compile_nothing()
    from megatron_ttrace.cpu import (
        apex,
        autocast,
        bridge,
        collectives,
        cuda,
        devices,
        operators,
    )

    # First, while torch.cuda still tells the truth to a real TransformerEngine.
    bridge.settle()
    te.install()
    devices.install()
    cuda.install()
    autocast.install()
    collectives.install()
    apex.install()
    operators.install()
    bridge.install()
    _active = True
