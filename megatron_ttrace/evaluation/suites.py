# SPDX-License-Identifier: Apache-2.0
"""What all suites share: the data of their jobs, and how they sum up a finished check."""

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

from megatron_ttrace.trace.errors import ExitCode
from megatron_ttrace.trace.records import Outcome, Summary, Verdict


class Data(StrEnum):
    """What a job is trained on."""

    MOCK = "mock"
    UNEVEN = "uneven"
    """Long stretches with a share of document ends of their own, from none to nearly all. With
    ``--eod-mask-loss``, ranks have very different numbers of unmasked tokens."""
    DOCUMENTS = "documents"
    """Documents from a single token to several sequences, for ``--eod-mask-loss``,
    ``--reset-position-ids`` and ``--reset-attention-mask``."""


_STRETCHES, _TOKENS, _LARGEST_SHARE = 512, 96, 0.9
_DOCUMENTS, _LONGEST = 2048, 120


def data_arguments(data: Data, directory: Path, words: int) -> tuple[str, ...]:
    """Megatron's arguments for a data set, which is written below ``directory`` on first use.

    The vocabulary has so many ``words``; the last one ends a document.
    """
    if data is Data.MOCK:
        return ("--mock-data",)
    from megatron_ttrace.jobs import text_data

    prefix = (directory / "data" / f"{data}-{words}").resolve()
    if not prefix.with_name(f"{prefix.name}.idx").exists():
        documents = _uneven(words) if data is Data.UNEVEN else _documents(words)
        text_data.write_corpus(documents, prefix, append_eod=False)
    return ("--data-path", str(prefix), "--split", "100,0,0")


def _uneven(words: int) -> Iterator[bytes]:
    import numpy as np

    random = np.random.default_rng(1)
    for share in random.uniform(0, _LARGEST_SHARE, _STRETCHES):
        ids = random.integers(0, words - 1, _TOKENS)
        ids[random.random(_TOKENS) < share] = words - 1
        yield ids.astype(np.uint8).tobytes()


def _documents(words: int) -> Iterator[bytes]:
    import numpy as np

    random = np.random.default_rng(1)
    # Uniform on a logarithmic scale: as many documents of 1 to 10 tokens as of 12 to 120.
    lengths = np.exp(random.uniform(0, np.log(_LONGEST), _DOCUMENTS)).astype(int)
    for length in lengths:
        ids = random.integers(0, words - 1, length + 1)
        ids[-1] = words - 1
        yield ids.astype(np.uint8).tobytes()


def margin_of(verdict: Verdict) -> float:
    """The margin; 0 for a tensor that is unchecked or compared by luck, where it says nothing."""
    silent = verdict.verdict is Outcome.UNCHECKED or verdict.is_luck
    return 0.0 if silent else verdict.margin or 0.0


def culprits_of(summary: Summary) -> str:
    """The first culprits, in words."""
    return "; ".join(f"{c.name} {c.kind} ({c.verdict})" for c in summary.culprits[:3])


def exit_code(*, alarm: bool, met: bool) -> ExitCode:
    """1 if a healthy job diverged, else 0 if everything is as expected, else 2."""
    if alarm:
        return ExitCode.DIVERGED
    return ExitCode.EQUIVALENT if met else ExitCode.COULD_NOT_CHECK
