# SPDX-License-Identifier: Apache-2.0
"""Code in modules that were imported."""

import sys
import types

import pytest

from megatron_ttrace.mcore import imported, sources

CODE = """
import functools
def plain():
    def inner():
        return [x for x in ()]
    return inner
def decorate(f):
    @functools.wraps(f)
    def wrapper():
        return f()
    return wrapper
@decorate
def wrapped():
    pass
class Layer:
    class Inner:
        def within(self):
            pass
    @property
    def size(self):
        pass
    @staticmethod
    def static():
        pass
    @functools.lru_cache
    def cached(self):
        pass
partial = functools.partial(lambda x: x, 1)
class Odd(type):
    __module__ = property(lambda cls: 1)
odd = Odd("odd", (), {})
"""


def changed():
    """In the place of another."""


def made(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module of Megatron's."""
    module = types.ModuleType("megatron.made")
    module.__file__ = f"{sources.megatron_folder()}core/made.py"
    exec(compile(CODE, module.__file__, "exec"), vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_code_of_imported_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all functions in a module of Megatron's; of other modules, none."""
    known = {*sys.modules}
    made(monkeypatch)
    monkeypatch.setitem(sys.modules, "elsewhere", types.ModuleType("elsewhere"))
    names = sorted(code.co_name for code in imported.imported_code(known, sources.in_megatron))
    assert names == sorted(
        "plain inner decorate wrapper wrapper wrapped within size static cached <lambda>".split()
    )
    assert {"megatron.made", "elsewhere"} <= known
    assert not list(imported.imported_code(known, sources.in_megatron))


def test_code_that_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what replaces a method or a module since, or was added; and once, not again."""
    monkeypatch.setattr(imported, "_REMEMBERED", [])
    module = made(monkeypatch)
    before = [*imported.megatrons_code(set())]
    imported.remember()
    known: set[str] = set()
    assert [*imported.megatrons_code(known)] == before
    assert known == {*sys.modules}
    assert not [*imported.megatrons_code(known)]
    monkeypatch.setattr(module.Layer.Inner, "within", lambda self: made)
    vars(module)["more"] = lambda: made
    monkeypatch.setattr(module.Layer.static, "__code__", changed.__code__)
    del module.plain
    new = [code for code in imported.megatrons_code(set()) if code not in before]
    assert [code.co_firstlineno for code in new] == [
        changed.__code__.co_firstlineno,
        module.more.__code__.co_firstlineno,
        module.Layer.Inner.within.__code__.co_firstlineno,
    ]
    [contents] = imported._REMEMBERED
    imported.remember()
    assert imported._REMEMBERED[0] is contents
    other = made(monkeypatch)
    assert other.plain.__code__ in [*imported.megatrons_code(set())]
    imported.remember()
    assert imported._REMEMBERED[0] is not contents
