# SPDX-License-Identifier: Apache-2.0
"""``torch.autocast("cuda")``: its rules, for tensors that are on a CPU.

PyTorch casts the operands of products to the lower precision on any device, but on CUDA alone those
of exponentials, sums, norms and losses to float32. So both devices have one state, as a tensor's
device is the CPU, and operators that only CUDA's casts get its rule (``ATen/autocast_mode.h``).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.amp import autocast_mode
from torch.utils import _pytree as pytree

from megatron_ttrace.cpu.devices import to_cpu

_LOWER = frozenset(
    "addmv addr chain_matmul einsum gru_cell linalg_multi_dot lstm_cell mv rnn_relu_cell "
    "rnn_tanh_cell".split()
)
_WIDEST = frozenset(
    "addcdiv addcmul atan2 bilinear cross dot index_put scatter_add tensordot vdot".split()
)
"""In the widest dtype of their operands; all others that CUDA's autocast has are in float32."""
_BOTH = ("cuda", "cpu")
_COARSE = (torch.float16, torch.bfloat16)


def _cast(operands: Any, name: str) -> Any:
    """The operands of an operator, all in the dtype in which autocast computes it."""
    dtypes = {x.dtype for x in pytree.tree_leaves(operands) if torch.is_tensor(x)}
    target = torch.float32
    if name in _LOWER:
        target = torch.get_autocast_dtype("cpu")
    elif name in _WIDEST and torch.float32 not in dtypes:
        return operands

    def cast(operand: Any) -> Any:
        is_cast = torch.is_tensor(operand) and operand.dtype in (*_COARSE, torch.float32)
        return operand.to(target) if is_cast else operand

    return pytree.tree_map(cast, operands)


def _registered(key: str) -> set[str]:
    """The operators with a rule of their own under a dispatch key."""
    return set(torch._C._dispatch_get_registrations_for_dispatch_key(key))


def dtype_or(default: torch.dtype) -> torch.dtype:
    """What TransformerEngine's modules compute in: CUDA's autocast decides, if it is on."""
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else default


def kernel[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """A function that stands for a GPU's kernel, in which autocast changes nothing."""

    @functools.wraps(function)
    def alone(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_autocast_enabled("cpu"):
            return function(*args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            return function(*args, **kwargs)

    return alone


@functools.cache
def _complete() -> torch.library.Library:
    """Give the CPU's autocast the rules that only CUDA's has; they live as long as the result."""
    library = torch.library.Library("aten", "IMPL")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    for full in sorted(_registered("AutocastCUDA") - _registered("AutocastCPU")):
        namespace, _, name = full.partition("::")
        packet, _, overload = name.partition(".")
        if namespace != "aten":
            continue
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")

        def rule(*args: Any, operator: Any = operator, name: str = packet, **kwargs: Any) -> Any:
            args, kwargs = _cast((args, kwargs), name)
            with torch._C._ExcludeDispatchKeyGuard(keys):
                return operator(*args, **kwargs)

        library.impl(name, rule, "AutocastCPU")
    return library


def install() -> None:
    """Let both devices have one state and CUDA's rules, registered when they are first used."""
    turn, set_dtype = torch.set_autocast_enabled, torch.set_autocast_dtype
    cast = autocast_mode._cast

    @functools.wraps(turn)
    def set_autocast_enabled(*args: Any) -> None:
        # Without a device, CUDA's is meant.
        for device in _BOTH if args[0] in (*_BOTH, True, False) else args[:1]:
            turn(device, args[-1])
        if args[-1]:
            _complete()

    @functools.wraps(set_dtype)
    def set_autocast_dtype(device_type: str, dtype: torch.dtype) -> None:
        for device in _BOTH if device_type in _BOTH else (device_type,):
            set_dtype(device, dtype)

    for replacement in (set_autocast_enabled, set_autocast_dtype):
        setattr(torch, replacement.__name__, replacement)
    torch.set_autocast_dtype("cpu", torch.get_autocast_dtype("cuda"))
    # For inputs of autograd functions (``custom_fwd``).
    autocast_mode._cast = lambda value, device_type, dtype: cast(value, to_cpu(device_type), dtype)
