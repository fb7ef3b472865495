# SPDX-License-Identifier: Apache-2.0
"""Every single flipped bit of a trace and of a report is noticed, and reported in one line."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_ttrace.compare import tolerance
from megatron_ttrace.compare.moved import FILE as TOLERANCES
from megatron_ttrace.compare.moved import Moved, write_moves
from megatron_ttrace.trace import files
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.records import Kind, Result, Summary, TraceKey
from megatron_ttrace.trace.store import Entry, TraceReader, TraceWriter, seal, verify
from tests.report.synthetic_report import make_verdict

KEY = TraceKey(1, 0, Kind.OUTPUT, "a")
INDEX, DATA = "rank-00000.index.jsonl", "rank-00000.0000.safetensors"


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    """A small reference, with everything that a real one has."""
    writer = TraceWriter(tmp_path, 0)
    writer.add(Entry(KEY, (4,), "float32"), torch.arange(4.0))
    writer.close()
    write_moves(tmp_path, {KEY: Moved(4, 3.75, (1e-7, 2e-7))})
    (tmp_path / "overrides.json").write_text('{"overrides": {}}')
    seal(tmp_path, {"role": "reference", "fingerprint": "0123"})
    return tmp_path


def unnoticed(path: Path, read: Callable[[], object]) -> list[int]:
    """The bits whose flip leaves a file readable; every error must be one line."""
    original = path.read_bytes()
    read()
    bits = []
    with path.open("r+b", buffering=0) as file:
        for bit in range(8 * len(original)):
            byte = bit // 8
            file.seek(byte)
            file.write(bytes([original[byte] ^ 1 << bit % 8]))
            try:
                read()
            except TTraceError as error:
                assert "\n" not in str(error)  # noqa: PT017 - many thousand times
                assert "again" in str(error) or "give a" in str(error)  # noqa: PT017
            else:
                bits.append(bit)
            file.seek(byte)
            file.write(original[byte : byte + 1])
    read()
    return bits


@pytest.mark.parametrize("name", ["meta.json", INDEX, DATA, TOLERANCES, "overrides.json"])
def test_whoever_chooses_a_reference_notices(reference: Path, name: str) -> None:
    """Rank 0 and the commands verify all of it."""
    assert unnoticed(reference / name, lambda: verify(reference)) == []


@pytest.mark.parametrize("name", ["meta.json", INDEX, TOLERANCES])
def test_the_other_ranks_notice(reference: Path, name: str) -> None:
    """They verify what they parse, and that it is what rank 0 chose."""
    announced = TraceReader(reference).checksum

    def read() -> None:
        tolerance.of_reference(TraceReader(reference, announced=announced))

    assert unnoticed(reference / name, read) == []


def test_another_trace_than_the_announced_one(reference: Path) -> None:
    """A trace that another run put in its place is refused, however sound."""
    announced = TraceReader(reference).checksum
    seal(reference, {"role": "reference", "fingerprint": "4567"})
    TraceReader(reference)
    with pytest.raises(TTraceError, match="is not the trace that rank 0 chose"):
        TraceReader(reference, announced=announced)


@pytest.mark.parametrize("name", ["rank-00001.index.jsonl", "rank-00000.0001.safetensors"])
def test_a_file_that_is_not_listed(reference: Path, name: str) -> None:
    """A stray file with the name of a trace file is refused, not read and not ignored."""
    (reference / name).write_bytes((reference / INDEX).read_bytes())
    with pytest.raises(TTraceError, match=f"{name} is not part of the trace"):
        verify(reference)


def test_a_report(tmp_path: Path) -> None:
    """The summary seals itself and the verdicts."""
    files.write_records(tmp_path / files.VERDICTS, [make_verdict("a")])
    summary = Summary(Result.EQUIVALENT, {"pass": 1}, (), {}, {}, {})
    files.write_summary(tmp_path / files.SUMMARY, summary)
    run = files.run_of(tmp_path)
    for name in (files.SUMMARY, files.VERDICTS):
        assert unnoticed(tmp_path / name, lambda: files.load_report(tmp_path)) == []
    assert unnoticed(tmp_path / files.VERDICTS, lambda: files.answer_of(tmp_path, run)) == []
