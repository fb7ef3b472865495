# SPDX-License-Identifier: Apache-2.0
"""Why known mutants survive: ``survivors.toml``, by id."""

import dataclasses
import tomllib
from collections.abc import Iterable
from pathlib import Path

from megatron_ttrace.trace import codec
from megatron_ttrace.trace.errors import TTraceError
from tests.assay.mutants.records import Explanation, Mutant

FILE = Path(__file__).with_name("survivors.toml")


@dataclasses.dataclass(frozen=True, slots=True)
class Survivor:
    """One explanation, for one or several mutants."""

    ids: tuple[str, ...]
    explanation: Explanation
    why: str


def load() -> list[Survivor]:
    """All explanations.

    Raises:
        TTraceError: when the file is damaged.
    """
    try:
        tables = tomllib.loads(FILE.read_text(encoding="utf-8"))["survivor"]
        return [codec.decode(Survivor, table) for table in tables]
    except (KeyError, ValueError, TypeError) as error:
        raise TTraceError(f"{FILE}: not a valid list of explanations ({error})") from error


def explanation_of(mutant: Mutant, known: Iterable[Survivor]) -> tuple[Explanation | None, str]:
    """What is known about a mutant, on one line."""
    for survivor in known:
        if mutant.id in survivor.ids:
            return survivor.explanation, " ".join(survivor.why.split())
    return None, ""
