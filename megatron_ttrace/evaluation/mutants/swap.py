# SPDX-License-Identifier: Apache-2.0
"""Put one mutant into this process."""

from __future__ import annotations

from types import CodeType, FunctionType

from megatron_ttrace.errors import TTraceError
from megatron_ttrace.evaluation.bugs import patching
from megatron_ttrace.evaluation.mutants.records import Mutant
from megatron_ttrace.evaluation.mutants.source import Source


def introduce(mutant: Mutant) -> list[tuple[FunctionType, CodeType]]:
    """Change the function that the mutant is in; returns it with the code it had.

    Raises:
        TTraceError: when the installed Megatron has something else at this place.
    """

    def change(text: str) -> str:
        source = Source(mutant.module, text)
        if source.between(mutant.span) != mutant.fragment:
            raise TTraceError(f"{mutant.id}: the installed Megatron is not the one it was found in")
        return source.replace(mutant.span, mutant.replacement)

    return patching.rewrite(mutant.module, change, "a mutant")
