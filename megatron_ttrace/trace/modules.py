# SPDX-License-Identifier: Apache-2.0
"""Names of modules."""

from collections.abc import Iterator

from megatron_ttrace.trace.records import ROOT


def module_of(name: str) -> str:
    """A module's name without the number of its run in a microbatch: ``mlp#1`` -> ``mlp``."""
    return name.partition("#")[0]


def is_within(name: str, module: str) -> bool:
    """Whether a module or a parameter is in a module, or that module; all are in the model."""
    return module == ROOT or f"{module_of(name)}.".startswith(f"{module_of(module)}.")


def around(name: str) -> Iterator[str]:
    """The modules around a module or a parameter, from the innermost, elements of lists too."""
    while name := name.rpartition(".")[0]:
        yield name
