# SPDX-License-Identifier: Apache-2.0
"""Numbers, texts, small tensors and containers in plain attributes; numbers in global variables.

A fork counts its steps in them, or keeps running means. Rehearsals are no steps of the run. But
that a cache or a flag is left from an earlier step must show in a traced one: before that,
only numbers, containers and tensors that were there are what they were.

Beside the model there may be averages of its weights, what another optimizer trains, or generators
of random numbers: of that tensors as large as the model are put back, too. It is in global
variables and attributes, in containers, and in the user's objects there.
"""

import copy
import functools
import itertools
import numbers
import random
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler

from megatron_ttrace.mcore.names import unwrap
from megatron_ttrace.mcore.sources import is_installed
from megatron_ttrace.trace.copies import Copies

_CONTAINERS = (list, dict, set, deque, Counter, defaultdict, tuple)  # the last cannot change
_DEPTH = 4
"""Containers in each other, ..."""
_LARGEST = 1 << 16
"""... items of one, and elements of a tensor, or of those in it; larger ones are left alone."""
_GENERATORS = (torch._C.Generator, np.random.Generator, np.random.RandomState, random.Random)
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
        others: Sequence[object],
        copies: Copies | None = None,
        arguments: object = None,
    ) -> None:
        """Copy it. ``copies`` has room for weights beside the model; without, that is left out.

        A user's objects may also be among the script's ``arguments``.
        """
        modules = [module for chunk in chunks for module in unwrap(chunk).modules()]
        weights = sum(p.numel() for m in chunks for p in m.parameters())
        most = 0 if copies is None else max(weights, _LARGEST)
        self._modules = [_Kept(module, most) for module in modules if not _is_managed(module)]
        users = _users_modules(len(sys.modules))
        # Megatron's own objects (configurations, dispatchers) belong to states that are not plain.
        names = {m.__name__ for m in users if m.__name__.partition(".")[0] != "megatron"}
        held = {id(v): v for m in modules for n, v in vars(m).items() if n not in _OF_TORCH}
        objects = (v for v in held.values() if type(v).__module__ in names and v not in modules)
        self._modules += (_Kept(v, most) for v in objects if hasattr(v, "__dict__"))
        self._others: list[_Kept | _Begun | _Trained] = [
            _Kept(other) for other in (*others, *users)
        ]
        variables = [v for m in users for v in vars(m).values()]
        given = [] if arguments is None else [*vars(arguments).values()]
        reached = _reached([*variables, *held.values(), *given], names)
        self._draws = [_drawn(v) for v in reached if type(v) in _GENERATORS]
        if copies is not None:
            shared = {id(tensor) for chunk in chunks for tensor in _tensors(chunk)}
            own = [v for v in reached if _is_state(v, names)]
            own += (m for m in users if m.__name__ in names)
            self._others += [_Kept(each, most) for each in own]
            own += [arguments] * (arguments is not None)
            self._others += [_Begun(each, names, modules) for each in own]
            kinds, known = (torch.nn.Module, torch.optim.Optimizer), {*map(id, others)}
            trained = (v for v in reached if issubclass(type(v), kinds) and id(v) not in known)
            self._others += [_Trained(each, shared, copies) for each in trained]

    def restore(self, *, whole: bool = False) -> None:
        """Put numbers, containers and tensors back that were there.

        ``whole``: of modules also what is new, flags and texts.
        """
        for kept in self._modules:
            kept.restore(whole=whole)
        for other in self._others:
            other.restore()
        for draw in self._draws:
            draw()


class _Kept:
    """The plain attributes of one object."""

    def __init__(self, owner: Any, largest: int = 0) -> None:
        """Copy them; of a module of Python's, if no ``largest`` size is given, only numbers."""
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


class _Begun:
    """What an owner has nothing of yet: a step may begin an average of weights, for instance."""

    def __init__(
        self, owner: Any, names: Container[str], modules: Sequence[torch.nn.Module]
    ) -> None:
        self._owner, self._names, self._modules = owner, names, modules
        self._values = {**vars(owner)}
        containers: Any = [v for v in self._values.values() if type(v) in _CONTAINERS[:-1]]
        self._empty = [container for container in containers if not container]
        self._hooks = _hooks_of(modules)

    def restore(self) -> None:
        # What registered hooks would do so again.
        if self._hooks != _hooks_of(self._modules):
            return
        values = vars(self._owner)
        for name, now in [*values.items()]:
            if self._values.get(name) is None and self._is_begun(now):
                del values[name]
                values |= {name: None} if name in self._values else {}
        for container in self._empty:
            if self._is_begun(container):
                container.clear()

    def _is_begun(self, value: Any) -> bool:
        kinds = torch.Tensor, torch.nn.Module, torch.optim.Optimizer
        leaves = _leaves(value)
        return any(issubclass(type(v), kinds) or _is_state(v, self._names) for v in leaves)


def _hooks_of(modules: Iterable[torch.nn.Module]) -> list[int]:
    """How many hooks each of some modules has."""
    owners = ((module, *module.parameters(recurse=False)) for module in modules)
    return [len(getattr(each, n, None) or ()) for some in owners for each in some for n in _HOOKS]


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


def _reached(roots: Iterable[Any], names: Container[str]) -> list[Any]:
    """These, and what is in them if they are containers, or hold a user's state."""
    found: dict[int, Any] = {}
    remaining = [*roots]
    while remaining:
        value = remaining.pop()
        if id(value) in found:
            continue
        found[id(value)] = value
        if type(value) in _CONTAINERS and len(value) <= _LARGEST:
            remaining += _items(value)
        elif _is_state(value, names):
            remaining += vars(value).values()
    return [*found.values()]


def _is_state(value: Any, names: Container[str]) -> bool:
    """Whether it is an object of a user's class: what gives data has given it."""
    kind = type(value)
    gives = any(hasattr(kind, name) for name in ("__next__", "__iter__", "__getitem__"))
    is_users = kind.__module__ in names or issubclass(kind, SimpleNamespace | LRScheduler)
    others = torch.nn.Module, torch.optim.Optimizer
    return is_users and hasattr(value, "__dict__") and not (gives or issubclass(kind, others))


def _plain_of(owner: Any, largest: int = 0) -> Iterator[tuple[str, Any]]:
    ignored = _OF_TORCH if isinstance(owner, torch.nn.Module) else ()
    numbers_only = isinstance(owner, ModuleType) and not largest
    for name, value in [*vars(owner).items()]:
        wanted = _is_number(value) if numbers_only else _is_plain(value, largest or _LARGEST)
        if name not in ignored and wanted:
            yield name, value


def _drawn(generator: Any) -> Callable[[], Any]:
    """What puts the state of a generator of random numbers back."""
    if isinstance(generator, random.Random):
        return functools.partial(generator.setstate, generator.getstate())
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return functools.partial(setattr, bits, "state", bits.state)
    return functools.partial(generator.set_state, generator.get_state())


def _is_number(value: Any) -> bool:
    """And no flag. By its type: objects of C libraries, for instance, may have no ``__class__``."""
    kind = type(value)
    return issubclass(kind, numbers.Number) and not issubclass(kind, bool)


def _is_plain(value: Any, largest: int = _LARGEST) -> bool:
    items = [*itertools.islice(_leaves(value), largest + 1)]
    tensors = [item for item in items if type(item) is torch.Tensor]
    return (
        len(items) <= largest
        and all(map(_is_simple, items))
        and all(map(_is_there, tensors))
        and sum(tensor.numel() for tensor in tensors) <= largest
    )


def _leaves(value: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """A value, or what is in a container, and in others there."""
    if type(value) not in _CONTAINERS or not depth:
        yield value
        return
    for item in _items(value):
        yield from _leaves(item, depth - 1)


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
        return _is_plain(now, sys.maxsize - 1) and forms[0] == forms[1]
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
        before, contents = content
        if type(value) is not tuple:
            value.clear()
            (value.update if isinstance(value, dict | set) else value.extend)(before)
        for item, data in zip(_items(before), contents, strict=True):
            _refill(item, data)


def _rest_of(owner: Any) -> list[tuple[str, int]]:
    """Which other attributes a module has, and how many hooks it and its parameters have."""
    if not isinstance(owner, torch.nn.Module):
        return []
    plain = {name for name, _ in _plain_of(owner)}
    rest = [(n, id(v)) for n, v in vars(owner).items() if n not in plain and n not in _OF_TORCH]
    return rest + [("", number) for number in _hooks_of([owner])]


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
