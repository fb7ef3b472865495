# SPDX-License-Identifier: Apache-2.0
"""Modules that stand in for those of a package that is not there; functions, for others."""

import importlib
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def offer(name: str, contents: Mapping[str, Any]) -> None:
    """Make ``import name`` find a module with these contents; its parent must be offered first."""
    module = ModuleType(name, f"Standing in for {name} on a CPU.")
    module.__dict__.update(contents)
    module.__path__ = []

    def lacking(attribute: str) -> Any:
        raise AttributeError(f"{name}.{attribute} is not emulated on a CPU")

    module.__dict__["__getattr__"] = lacking
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)


def offer_all(package: str, offered: Mapping[str, Mapping[str, str]]) -> None:
    """Offer modules with names of modules of ``package``: ``{module: {home: "names"}}``."""
    for name, homes in offered.items():
        contents: dict[str, Any] = {}
        for home, words in homes.items():
            module = importlib.import_module(f"{package}.{home}")
            contents |= {word: getattr(module, word) for word in words.split()}
        offer(name, contents)


def replace_everywhere(name: str, original: Any, replacement: Any) -> None:
    """Replace a function in all modules that imported it by its name; none is asked for more.

    ``None`` among them keeps a package from being imported.
    """
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and vars(module).get(name) is original:
            setattr(module, name, replacement)
