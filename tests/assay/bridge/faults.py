# SPDX-License-Identifier: Apache-2.0
"""Faults in jobs of Megatron-Bridge, and what must be named."""

import dataclasses
import functools
import tomllib
from collections.abc import Mapping
from fnmatch import fnmatchcase

from megatron_ttrace.trace.records import Kind, Result
from tests.assay.bridge.jobs import FILE, Answer


@dataclasses.dataclass(frozen=True)
class Fault:
    """A row of the table.

    Attributes:
        job: the job that shows it.
        module: pattern of the name of its first culprit.
        kind: of that culprit's tensor.
        bug: a known bug of ``ttrace eval bugs``, or
        planted: a mistake of ``tests/assay/planted/bridge.py``; without either, Bridge's own.
    """

    job: str
    module: str
    kind: Kind
    bug: str = ""
    planted: str = ""

    @property
    def flags(self) -> tuple[str, ...]:
        """Of ``ttrace check``."""
        return ("--ttrace-bug", self.bug) if self.bug else ()

    def is_found_by(self, answer: Answer) -> bool:
        """Whether the first culprit is the right one."""
        if answer.verdict != Result.DIVERGED or not answer.culprits:
            return False
        name, kind, _ = answer.culprits[0]
        return fnmatchcase(name, self.module) and kind == self.kind


@functools.cache
def faults() -> Mapping[str, Fault]:
    """The table."""
    rows = tomllib.loads(FILE.read_text(encoding="utf-8"))["faults"]
    return {name: Fault(**{**row, "kind": Kind(row["kind"])}) for name, row in rows.items()}
