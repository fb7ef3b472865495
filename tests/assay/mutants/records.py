# SPDX-License-Identifier: Apache-2.0
"""A mutant, and where in a training step its code runs."""

import dataclasses
from enum import StrEnum

from tests.assay.mutants.source import Span


@dataclasses.dataclass(frozen=True, slots=True)
class Mutant:
    """One single fault.

    Attributes:
        id: does not change while the changed statement stays in its function.
        module: e.g. ``megatron.core.tensor_parallel.mappings``.
        qualname: of the outermost function around it.
        operator: name of the operator.
        span: what is replaced.
        fragment: its text.
        replacement: the new text.
        statement: the first line of the statement around it.
        classes: those that the statement names, or the branch of an ``if`` that it is in.
    """

    id: str
    module: str
    qualname: str
    operator: str
    span: Span
    fragment: str
    replacement: str
    statement: str = ""
    classes: tuple[str, ...] = ()

    def __str__(self) -> str:
        before, after = (" ".join(text.split()) for text in (self.fragment, self.replacement))
        return f"{before}  ->  {after}"

    @property
    def package(self) -> str:
        """The part of Megatron it is in: what the module's name has after ``megatron.core``."""
        words = self.module.split(".")[2:]
        return ".".join(words[:2] if words[:1] == ["transformer"] else words[:1])


class Phase(StrEnum):
    """The part of a training step that code outside of any module belongs to."""

    SETUP = "setup"
    """Before the first forward pass."""
    SCHEDULE = "schedule"
    """Microbatches, pipeline stages, and what is sent between them."""
    GRADIENTS = "gradients"
    """Reduction of gradients, and gathering of parameters."""
    OPTIMIZER = "optimizer"
    LOGGING = "logging"
    """None of the others."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ran:
    """Where a mutated function runs without the mutant.

    ``modules`` are those in whose forward pass, backward pass or constructor it runs; layers are
    not numbered (``decoder.layers.*.mlp``). ``phases`` are those in which it runs outside of them.
    """

    modules: tuple[str, ...] = ()
    phases: tuple[Phase, ...] = ()
