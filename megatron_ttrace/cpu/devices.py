# SPDX-License-Identifier: Apache-2.0
"""Requests for a CUDA device, in every way PyTorch knows, become requests for the CPU.

Only the *place* of a tensor is changed here, never its dtype, layout or values, so the arithmetic
is that of the same PyTorch call on the CPU.

The functions that take a device are replaced one by one instead of running everything under a
``TorchFunctionMode``: a mode is per thread (a checkpoint writer's thread would not have it) and
costs Python time on every operation, which would distort what this package measures.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.jit import _builtins as jit_builtins
from torch.utils import _device as torch_device_module

FACTORIES = (
    "arange asarray as_tensor bartlett_window blackman_window empty empty_like empty_permuted "
    "empty_strided eye from_file full full_like hamming_window hann_window kaiser_window linspace "
    "logspace ones ones_like rand rand_like randint randint_like randn randn_like randperm range "
    "normal scalar_tensor sparse_coo_tensor tensor tril_indices triu_indices zeros zeros_like"
).split()
TENSOR_FACTORIES = "new_empty new_empty_strided new_full new_ones new_tensor new_zeros".split()


def to_cpu(device: Any) -> Any:
    """``device`` with every spelling of a CUDA device turned into the CPU; others unchanged."""
    if isinstance(device, torch.device):
        return torch.device("cpu") if device.type == "cuda" else device
    is_number = isinstance(device, int) and not isinstance(device, bool)
    is_name = isinstance(device, str) and device.split(":")[0] == "cuda"
    return "cpu" if is_number or is_name else device


def _mapped(kwargs: dict[str, Any]) -> dict[str, Any]:
    if kwargs.get("device") is not None:
        kwargs["device"] = to_cpu(kwargs["device"])
    # Pinning is how a GPU reads host memory without a copy; with no GPU PyTorch raises.
    if kwargs.get("pin_memory"):
        kwargs["pin_memory"] = False
    return kwargs


def _redirected(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **(_mapped(kwargs) if kwargs else kwargs))

    # TorchScript looks builtins up by identity: without this, code that is scripted after
    # activation (PyTorch scripts some of its own on import) could not call the factory.
    builtin = jit_builtins._find_builtin(function)
    if builtin is not None:
        jit_builtins._register_builtin(wrapper, builtin)
    return wrapper


def _install_factories() -> None:
    # ``with torch.device("meta")`` recognises factories by identity through a cached set: fill
    # the cache with the originals, which the wrappers call.
    torch_device_module._device_constructors()
    for name in FACTORIES:
        if hasattr(torch, name):
            setattr(torch, name, _redirected(getattr(torch, name)))
    for name in TENSOR_FACTORIES:
        setattr(torch.Tensor, name, _redirected(getattr(torch.Tensor, name)))


class _Makes(type):
    """Makes PyTorch's own generators, and knows them."""

    def __call__(cls, device: Any = "cpu") -> torch.Generator:
        return torch._C.Generator(to_cpu(device))

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch._C.Generator)


class Generator(metaclass=_Makes):
    """In place of ``torch.Generator``, which cannot be wrapped: others use it as a type."""


def _install_context() -> None:
    """``with torch.device("cuda"):`` and ``torch.set_default_device("cuda")``."""
    context: Any = torch_device_module.DeviceContext
    build = context.__init__

    @functools.wraps(build)
    def init(self: Any, device: Any) -> None:
        build(self, to_cpu(device))

    context.__init__ = init


def _install_tensor_moves() -> None:
    original_to = torch.Tensor.to
    original_type = torch.Tensor.type

    @functools.wraps(original_to)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args:
            args = (to_cpu(args[0]), *args[1:])
        return original_to(self, *args, **_mapped(kwargs))

    def itself(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As ``cuda()`` and ``pin_memory()`` do for a tensor that is there already."""
        return self

    @functools.wraps(original_type)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        name = original_type(self, *args, **kwargs)
        # Megatron's optimizers choose by ``param.type() == 'torch.cuda.FloatTensor'`` which
        # parameters get an fp32 master copy, and gradient clipping asserts it. Everyone else
        # is told the truth.
        if isinstance(name, str) and _caller_is_megatron() and not name.startswith("torch.cuda."):
            return name.replace("torch.", "torch.cuda.", 1)
        return name

    def record_stream(self: torch.Tensor, stream: Any) -> None:
        """Nothing to keep alive: there is one stream and it has already finished."""

    for name, replacement in (
        ("to", to),
        ("cuda", itself),
        ("type", type_),
        ("pin_memory", itself),
        ("record_stream", record_stream),
    ):
        setattr(torch.Tensor, name, replacement)


def _caller_is_megatron() -> bool:
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("megatron.")


def _install_load() -> None:
    original = torch.load  # noqa: TID251 - Megatron calls it

    @functools.wraps(original)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        # A checkpoint that a GPU run wrote names CUDA devices; without a location PyTorch
        # would look for them.
        target = "cpu" if map_location is None else to_cpu(map_location)
        return original(f, target, *args, **kwargs)

    torch.load = load  # noqa: TID251


def _install_meshes() -> None:
    """Meshes of ranks whose devices are CPUs; torch's FSDP2 takes its device from the mesh."""
    if not torch.distributed.is_available():
        return
    from torch.distributed.device_mesh import DeviceMesh

    build = DeviceMesh.__init__

    @functools.wraps(build)
    def init(self: DeviceMesh, device_type: str, *args: Any, **kwargs: Any) -> None:
        build(self, to_cpu(device_type), *args, **kwargs)

    setattr(DeviceMesh, "__init__", init)  # noqa: B010 - mypy refuses the assignment


def install() -> None:
    """Replace everything through which Megatron names a device."""
    _install_factories()
    torch.Generator = Generator  # type: ignore[misc, assignment]
    _install_context()
    _install_tensor_moves()
    _install_load()
    _install_meshes()
