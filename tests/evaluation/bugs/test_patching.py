# SPDX-License-Identifier: Apache-2.0
"""Changing the code of functions that are in use already."""

import functools
import importlib
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from megatron_ttrace.evaluation.bugs import catalogue, patching
from megatron_ttrace.evaluation.bugs.catalogue import SourcePatch
from megatron_ttrace.trace.errors import TTraceError

SOURCE = '''
from __future__ import annotations
import functools
import torch

SCALE = 2


def loud(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)
    return wrapper


def silent(function):
    return lambda *args: function(*args)


def plain(x, y=1):
    """Has a default."""
    return x + y  # plain


@loud
def decorated(x):
    return x + 2  # decorated


@silent
@loud
def unnamed(x):
    return x + 3  # unnamed


@functools.lru_cache
def cached(x):
    return x + 3.5  # cached


def outer(x):
    base = 10

    def inner(y):
        def innermost(z):
            return base + x + y + z  # nested

        return innermost(1)

    return inner(2)


class Base:
    def call(self, x):
        return x


class Thing(Base):
    factor = 4

    def __init__(self):
        super().__init__()
        self.seen = 0

    def call(self, x):
        return super().call(x) + self.factor  # method

    @classmethod
    def of_class(cls, x):
        return x + cls.factor  # classmethod

    @staticmethod
    def static(x):
        return x + 5  # staticmethod

    @property
    def value(self):
        return 6  # getter

    @value.setter
    def value(self, x):
        self.seen = x  # setter

    @functools.cached_property
    def once(self):
        return 7  # cached property

    class Nested:
        def call(self):
            return 8  # nested class


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * SCALE  # forward

    @staticmethod
    def backward(ctx, grad):
        return grad * SCALE  # backward


if SCALE > 1:
    def conditional(x):
        return x + 9  # first branch
else:
    def conditional(x):
        return x + 10  # second branch
'''


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Writes a module that can be imported, once a test, and returns its name."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names: list[str] = []

    def make(source: str) -> str:
        name = f"fake_megatron_{len(names)}_{tmp_path.name.replace('-', '_')}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        names.append(name)
        return name

    yield make
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def module(write: Callable[[str], str]) -> ModuleType:
    return importlib.import_module(write(SOURCE))


def patch(module: ModuleType | str, fragment: str, replacement: str) -> SourcePatch:
    name = module if isinstance(module, str) else module.__name__
    return SourcePatch(name, fragment, replacement)


def double_gradient(module: ModuleType) -> float:
    import torch

    x = torch.ones((), requires_grad=True)
    module.Double.apply(x).backward()
    assert x.grad is not None
    return float(x.grad)


def set_value(module: ModuleType) -> int:
    thing = module.Thing()
    thing.value = 1
    return int(thing.seen)


CASES: list[tuple[str, str, str, Callable[[ModuleType], float], float, float]] = [
    ("function", "x + y  # plain", "x - y", lambda m: m.plain(3), 4, 2),
    ("decorated", "x + 2  # decorated", "x - 2", lambda m: m.decorated(3), 5, 1),
    ("unwrapped", "x + 3  # unnamed", "x - 3", lambda m: m.unnamed(3), 6, 0),
    ("cached", "x + 3.5  # cached", "x - 3.5", lambda m: m.cached(3), 6.5, -0.5),
    ("nested", "base + x + y + z", "base - x - y - z", lambda m: m.outer(3), 16, 4),
    ("method", "+ self.factor", "- self.factor", lambda m: m.Thing().call(3), 7, -1),
    ("classmethod", "x + cls", "x - cls", lambda m: m.Thing.of_class(3), 7, -1),
    ("staticmethod", "x + 5", "x - 5", lambda m: m.Thing.static(3), 8, -2),
    ("getter", "return 6", "return -6", lambda m: m.Thing().value, 6, -6),
    ("setter", "seen = x", "seen = -x", set_value, 1, -1),
    ("cached property", "return 7", "return -7", lambda m: m.Thing().once, 7, -7),
    ("nested class", "return 8", "return -8", lambda m: m.Thing.Nested().call(), 8, -8),
    ("autograd", "grad * SCALE", "grad * -SCALE", double_gradient, 2, -2),
    ("branch", "x + 9", "x - 9", lambda m: m.conditional(3), 12, -6),
]


@pytest.mark.parametrize(
    ("fragment", "replacement", "call", "before", "after"),
    [case[1:] for case in CASES],
    ids=[case[0] for case in CASES],
)
def test_live_function(
    module: ModuleType,
    fragment: str,
    replacement: str,
    call: Callable[[ModuleType], float],
    before: float,
    after: float,
) -> None:
    """Whatever holds the function, those who call it get the new code."""
    if fragment != "x + 3.5  # cached":
        assert call(module) == before
    old = patching.apply([patch(module, fragment, replacement)])
    assert call(module) == after
    for function, code in old:
        function.__code__ = code
    if not fragment.startswith("x + 3.5"):
        assert call(module) == before


def test_others_references(module: ModuleType) -> None:
    """A function that somebody imported by name, a bound method and a partial change too."""
    mine, bound = module.plain, module.Thing().call
    partial = functools.partial(module.plain, 3)
    patching.apply(
        [patch(module, "x + y  # plain", "x - y"), patch(module, "+ self.factor", "* self.factor")]
    )
    assert (mine(3), partial(), bound(3)) == (2, 2, 12)


def test_lines_may_move(module: ModuleType) -> None:
    """Functions below one that got longer stay what they are, and can be changed as well."""
    patching.apply(
        [
            patch(module, "    return x + y  # plain", "    z = x\n    z -= y\n    return z"),
            patch(module, "return 8  # nested class", "return 80"),
        ]
    )
    assert (module.plain(3), module.decorated(3), module.Thing.Nested().call()) == (2, 5, 80)


def test_all_or_nothing(module: ModuleType, write: Callable[[str], str]) -> None:
    """When one patch does not fit, the others are not applied either."""
    other = write("def f():\n    return 1\n")
    with pytest.raises(TTraceError, match="occurs 0 times"):
        patching.apply([patch(module, "x + y  # plain", "x - y"), patch(other, "absent", "x")])
    assert module.plain(3) == 4


REFUSED: list[tuple[str, str, str, str]] = [
    ("absent", "no such code", "x", "occurs 0 times"),
    ("twice", "def call(self, x):", "x", "occurs 2 times"),
    ("syntax", "x + y  # plain", "x +", "no valid Python"),
    ("module level", "SCALE = 2", "SCALE = 3", "more than the bodies"),
    ("class level", "factor = 4", "factor = 5", "more than the bodies"),
    ("signature", "def plain(x, y=1)", "def plain(x, y=2)", "more than the bodies"),
    ("decorator", "@loud\ndef decorated", "def decorated", "more than the bodies"),
    ("super", "return x + cls.factor", "return super().x", "outer variables"),
    ("not live", "x + 10", "x - 10", "something replaced it"),
]


@pytest.mark.parametrize(
    ("fragment", "replacement", "message"),
    [case[1:] for case in REFUSED],
    ids=[case[0] for case in REFUSED],
)
def test_refused(module: ModuleType, fragment: str, replacement: str, message: str) -> None:
    """One line with the reason and the module."""
    with pytest.raises(TTraceError, match=message) as caught:
        patching.apply([patch(module, fragment, replacement)])
    assert module.__name__ in str(caught.value)
    assert "\n" not in str(caught.value)


def test_replaced_function_is_refused(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where somebody put a function of his own, changing the old one would change nothing."""
    monkeypatch.setattr(module, "plain", lambda x: x)
    with pytest.raises(TTraceError, match="something replaced it"):
        patching.apply([patch(module, "x + y  # plain", "x - y")])


def test_missing_module() -> None:
    """One line that names the module."""
    with pytest.raises(TTraceError, match=r"no\.such\.module cannot be imported"):
        patching.apply([patch("no.such.module", "x", "y")])


def test_unknown_bug() -> None:
    """One line with the known ids."""
    with pytest.raises(TTraceError, match=r"--ttrace-bug 99: unknown; known: 01, .*bugs list"):
        patching.introduce("99")


def test_introduced_once(
    tmp_path: Path, write: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time does nothing, though the fragment would fit again."""
    name = write("def f(x):\n    return x\n")
    (tmp_path / "77-fake.toml").write_text(
        f"""
title = "fake"
upstream = []
confidence = "A"
axis = "none"
layout = [{{nproc = 1, arguments = ""}}]
patch = [{{module = "{name}", fragment = "return x", replacement = "return x + 1"}}]
expected = {{module = "*", kind = "output", direction = "forward", verdicts = ["diverged"]}}
"""
    )
    monkeypatch.setattr(catalogue, "folder", lambda: tmp_path)
    monkeypatch.setattr(patching, "_introduced", set())
    assert name not in sys.modules
    patching.introduce("77")
    patching.introduce("77")
    assert importlib.import_module(name).f(1) == 2


def test_stand_in_is_not_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the real TransformerEngine the stand-in's bug would change nothing, silently."""
    monkeypatch.setattr("megatron_ttrace.cpu.te.emulated", lambda: False)
    with pytest.raises(TTraceError, match="emulated TransformerEngine"):
        patching.introduce("14")
