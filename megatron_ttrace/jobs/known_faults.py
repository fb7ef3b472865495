# SPDX-License-Identifier: Apache-2.0
"""Which jobs combine what docs/findings.md proves to be faulty in Megatron (``known_faults.toml``).

This only labels a divergence; it changes no verdict.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

from megatron_ttrace.jobs.shrink.given import Flag, Given
from megatron_ttrace.trace import codec


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """What a job combines that shows a fault of Megatron's.

    Attributes:
        heading: the beginning of its heading in docs/findings.md, without the number.
        given: flags of the job; their values are patterns (fnmatch), or as ``2+``, at least 2.
        absent: flags of which the job has none, with such values.
        larger: two sizes (1 if not given), of which the first is larger.
        fixed: the series of Megatron that does not have the fault any more.
    """

    heading: str
    given: str
    absent: str = ""
    larger: tuple[str, str] | None = None
    fixed: tuple[int, ...] = ()

    def fits(self, job: Given) -> bool:
        """Whether the job has what it takes."""
        given, absent = (Given.parse(words.split()).flags for words in (self.given, self.absent))
        if self.larger is not None:
            large, small = (job.integer(option, 1) for option in self.larger)
            if large <= small:
                return False
        return all(_has(job, f) for f in given) and not any(_has(job, f) for f in absent)


def _has(job: Given, flag: Flag) -> bool:
    option, wanted = str(flag.option), " ".join(flag.values)
    if wanted.endswith("+"):
        return job.integer(option) >= int(wanted[:-1])
    return job.has(option) and fnmatch.fnmatchcase(job.text(option), wanted or "*")


@functools.cache
def findings() -> tuple[Finding, ...]:
    """All of them."""
    text = Path(__file__).with_name("known_faults.toml").read_text(encoding="utf-8")
    return codec.decode(tuple[Finding, ...], tomllib.loads(text)["finding"])


def finding_of(arguments: Sequence[str], megatron: str) -> str:
    """The heading of the finding that a diverging job may show; empty if it is a new one.

    Args:
        arguments: of the job.
        megatron: the version of its Megatron.
    """
    job = Given.parse(arguments)
    series = tuple(int(part) for part in re.findall(r"\d+", megatron)[:2])
    for finding in findings():
        if finding.fits(job) and not (finding.fixed and series >= finding.fixed):
            return finding.heading
    return ""
