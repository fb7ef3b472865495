# SPDX-License-Identifier: Apache-2.0
"""``torch.autocast("cuda")``: its rules, for tensors that are on a CPU.

PyTorch casts the operands of products to the lower precision on any device, but on CUDA alone those
of exponentials, sums, norms and losses to float32. So the state of CUDA's autocast becomes that of
the CPU's, too, and operators that only CUDA's casts get its rule (``ATen/autocast_mode.h``).
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
_COARSE = (torch.float16, torch.bfloat16)
_library: list[torch.library.Library] = []


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
def _complete() -> None:
    """Give the CPU's autocast the rules that only CUDA's has."""
    library = torch.library.Library("aten", "IMPL")
    _library.append(library)  # the rules live as long as it does
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


def install() -> None:
    """Let CUDA's autocast act on the CPU's tensors; nothing is registered before it is used."""
    turn, set_dtype, cast = (
        torch.set_autocast_enabled,
        torch.set_autocast_dtype,
        autocast_mode._cast,
    )

    @functools.wraps(turn)
    def set_autocast_enabled(*args: Any) -> None:
        turn(*args)
        if args[:-1] in ((), ("cuda",)):
            turn("cpu", args[-1])
        if args[-1]:
            _complete()

    @functools.wraps(set_dtype)
    def set_autocast_dtype(device_type: str, dtype: torch.dtype) -> None:
        set_dtype(device_type, dtype)
        set_dtype(to_cpu(device_type), dtype)

    for replacement in (set_autocast_enabled, set_autocast_dtype):
        setattr(torch, replacement.__name__, replacement)
    # For inputs of autograd functions (``custom_fwd``).
    autocast_mode._cast = lambda value, device_type, dtype: cast(value, to_cpu(device_type), dtype)
