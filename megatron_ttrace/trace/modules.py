# SPDX-License-Identifier: Apache-2.0
"""Names of modules."""

from collections.abc import Iterator

from megatron_ttrace.trace.records import ROOT


def module_of(name: str) -> str:
    """A module's name without what tells its runs in a microbatch apart: ``mlp#1`` -> ``mlp``."""
    return name.partition("#")[0]


def is_within(name: str, module: str) -> bool:
    """Whether a module or a parameter is in a module, or that module; all are in the model.

    So is what only runs in it, and is named for that (``shared#decoder/layers/2``).
    """
    own, _, run = name.partition("#")
    caller = run.partition("#")[0].replace("/", ".")
    inside = f"{module_of(module)}."
    return module == ROOT or f"{own}.".startswith(inside) or f"{caller}.".startswith(inside)


def around(name: str) -> Iterator[str]:
    """The modules around a module or a parameter, from the innermost, elements of lists too."""
    while name := name.rpartition(".")[0]:
        yield name
