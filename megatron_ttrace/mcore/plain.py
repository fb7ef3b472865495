# SPDX-License-Identifier: Apache-2.0
"""Numbers, texts, small tensors and containers in plain attributes; numbers in global variables.

A fork counts its steps in them, or keeps running means. Rehearsals are no steps of the run. But
that a cache or a flag is left from an earlier step must show in a traced one: before that,
only numbers, containers and tensors that were there are what they were.

Beside the model there may be averages of its weights, or what another optimizer trains: of that
tensors as large as the model are put back, too. It is in global variables, or in objects there.
"""

import copy
import functools
import math
import numbers
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Container, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch

from megatron_ttrace.mcore.names import unwrap
from megatron_ttrace.mcore.sources import is_installed
from megatron_ttrace.trace.copies import Copies

_CONTAINERS = (list, dict, set, deque, Counter, defaultdict)
_MOST = 1000
"""Items of a container, ..."""
_LARGEST = 1 << 16
"""... and elements of a tensor, or of those in a container; larger ones are left alone."""
_MISSING = object()
_OF_TORCH = frozenset(vars(torch.nn.Module()))
_MANAGED = ("transformer_engine.", "megatron_ttrace.")
"""Where classes are defined whose attributes belong together with states that are not plain."""
_HOOKS = """
_forward_hooks _forward_pre_hooks _backward_hooks _backward_pre_hooks _post_accumulate_grad_hooks
""".split()
_FORM = ("shape", "dtype", "device")


class PlainState:
    """What the modules of some models, other objects and the user's code hold now."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        others: Iterable[object],
        copies: Copies | None = None,
    ) -> None:
        """Copy it. ``copies`` has room for weights beside the model; without, that is left out."""
        modules = [module for chunk in chunks for module in unwrap(chunk).modules()]
        self._modules = [_Kept(module) for module in modules if not _is_managed(module)]
        users = _users_modules(len(sys.modules))
        # Megatron's own objects (configurations, dispatchers) belong to states that are not plain.
        names = {m.__name__ for m in users if m.__name__.partition(".")[0] != "megatron"}
        held = {id(v): v for m in modules for v in vars(m).values() if type(v).__module__ in names}
        objects = (v for v in held.values() if hasattr(v, "__dict__") and v not in modules)
        self._modules += map(_Kept, objects)
        self._others: list[_Kept | _Trained] = [_Kept(other) for other in (*others, *users)]
        if copies is not None:
            shared = {id(tensor) for chunk in chunks for tensor in _tensors(chunk)}
            variables = {id(v): v for m in users for v in vars(m).values()}
            own = [v for v in variables.values() if _is_state(v, names)]
            weights = sum(p.numel() for m in chunks for p in m.parameters())
            self._others += [_Kept(each, max(weights, _LARGEST)) for each in own]
            held = variables | {id(v): v for each in own for v in vars(each).values()}
            kinds = torch.nn.Module, torch.optim.Optimizer
            trained = (v for v in held.values() if issubclass(type(v), kinds))
            self._others += [_Trained(each, shared, copies) for each in trained]

    def restore(self, *, whole: bool = False) -> None:
        """Put numbers, containers and tensors back that were there.

        ``whole``: of modules also what is new, flags and texts.
        """
        for kept in self._modules:
            kept.restore(whole=whole)
        for other in self._others:
            other.restore()


class _Kept:
    """The plain attributes of one object."""

    def __init__(self, owner: Any, largest: float = _LARGEST) -> None:
        self._owner = owner
        plain = _plain_of(owner, largest)
        self._values = {name: (value, _copied(value)) for name, value in plain}
        self._rest = _rest_of(owner)

    def restore(self, *, whole: bool = False) -> None:
        values = vars(self._owner)
        # What was made or registered once, as a flag or a length says, is there only once.
        whole = whole and self._rest == _rest_of(self._owner)
        added = [name for name, _ in _plain_of(self._owner) if name not in self._values]
        for name in added if whole else ():
            del values[name]
        for name, (before, content) in self._values.items():
            now = values.get(name, _MISSING)
            if _is_alike(before, now) or (whole and (now is _MISSING or _is_plain(now))):
                _refill(before, content)
                values[name] = before


class _Trained:
    """The weights of a module beside the model, or those of an optimizer and its state."""

    def __init__(self, owner: Any, shared: Container[int], copies: Copies) -> None:
        if isinstance(owner, torch.nn.Module):
            self._state, tensors = [], [*_tensors(owner)]
        else:
            state = [each for each in owner.state.values() if isinstance(each, dict)]
            changed = owner.state, *state, *owner.param_groups
            self._state = [(each, {**each}) for each in changed]
            tensors = [t for group in owner.param_groups for t in group["params"]]
            tensors += (v for each in state for v in each.values())
        there = (t for t in tensors if torch.is_tensor(t) and _is_there(t))
        self._kept = [(t, copies.copy(t)) for t in there if id(t) not in shared]

    def restore(self) -> None:
        for now, before in self._state:
            now.clear()
            now.update(before)
        with torch.no_grad():
            for tensor, copy in self._kept:
                copy.put(tensor)


def _tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    # Megatron's DDP has an attribute of this name.
    yield from torch.nn.Module.buffers(module)


def _is_state(value: Any, names: Container[str]) -> bool:
    """Whether it is an object of a user's class: what gives data has given it."""
    gives = any(hasattr(type(value), name) for name in ("__next__", "__iter__", "__getitem__"))
    is_users = type(value).__module__ in names and hasattr(value, "__dict__")
    return is_users and not (gives or isinstance(value, torch.nn.Module))


def _plain_of(owner: Any, largest: float = _LARGEST) -> Iterator[tuple[str, Any]]:
    ignored = _OF_TORCH if isinstance(owner, torch.nn.Module) else ()
    for name, value in [*vars(owner).items()]:
        is_module = isinstance(owner, ModuleType)
        wanted = _is_number(value) if is_module else _is_plain(value, largest)
        if name not in ignored and wanted:
            yield name, value


def _is_number(value: Any) -> bool:
    """And no flag. By its type: objects of C libraries, for instance, may have no ``__class__``."""
    kind = type(value)
    return issubclass(kind, numbers.Number) and not issubclass(kind, bool)


def _is_plain(value: Any, largest: float = _LARGEST) -> bool:
    items = [*_items(value)] if type(value) in _CONTAINERS else [value]
    tensors = [item for item in items if type(item) is torch.Tensor]
    return (
        len(items) <= _MOST
        and all(map(_is_simple, items))
        and all(map(_is_there, tensors))
        and sum(tensor.numel() for tensor in tensors) <= largest
    )


def _items(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def _is_simple(value: Any) -> bool:
    kind = type(value)
    return value is None or kind is torch.Tensor or issubclass(kind, (numbers.Number, str, bytes))


def _is_there(tensor: torch.Tensor) -> bool:
    """Whether it has values: the memory of some is given back between steps."""
    return tensor.device.type != "meta" and tensor.untyped_storage().nbytes() > 0


def _is_alike(before: Any, now: Any) -> bool:
    """Whether both are numbers but no flags, containers, or tensors of one form."""
    if type(before) is type(now) and type(before) in (torch.Tensor, *_CONTAINERS):
        forms = [[getattr(v, name, None) for name in _FORM] for v in (before, now)]
        # Memory that was empty when the run began may be large by now.
        return _is_plain(now, math.inf) and forms[0] == forms[1]
    return _is_number(before) and _is_number(now)


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone(), value._version
    if type(value) in _CONTAINERS:
        before = copy.copy(value)
        return before, [*map(_copied, _items(before))]
    return value


def _refill(value: Any, content: Any) -> None:
    """Write what a container or tensor held into it: others may refer to it."""
    if isinstance(value, torch.Tensor):
        data, version = content
        if value._version != version and _is_there(value):
            value.detach().copy_(data)
    elif type(value) in _CONTAINERS:
        value.clear()
        before, contents = content
        (value.update if isinstance(value, dict | set) else value.extend)(before)
        for item, data in zip(_items(before), contents, strict=True):
            _refill(item, data)


def _rest_of(owner: Any) -> list[tuple[str, int]]:
    """Which other attributes a module has, and how many hooks it and its parameters have."""
    if not isinstance(owner, torch.nn.Module):
        return []
    plain = {name for name, _ in _plain_of(owner)}
    rest = [(n, id(v)) for n, v in vars(owner).items() if n not in plain and n not in _OF_TORCH]
    hooked = (owner, *owner.parameters(recurse=False))
    return rest + [(n, len(getattr(each, n, None) or ())) for each in hooked for n in _HOOKS]


def _is_managed(module: torch.nn.Module) -> bool:
    kinds = (kind.__module__ for kind in type(module).__mro__ if kind is not torch.nn.Module)
    return any(f"{kind}.".startswith(_MANAGED) for kind in kinds)


@functools.cache
def _users_modules(_: int) -> tuple[ModuleType, ...]:
    """The script, and the modules that are not installed, among so many that are imported."""

    def is_users(name: str, module: ModuleType) -> bool:
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or name == "__mp_main__":
            return False
        return not is_installed(file) and not f"{name}.".startswith(_MANAGED)

    return tuple(module for name, module in list(sys.modules.items()) if is_users(name, module))
