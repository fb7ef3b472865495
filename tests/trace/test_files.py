# SPDX-License-Identifier: Apache-2.0
"""The two files of the contract: round trips, and one clear line for everything else."""

import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.report import publish
from megatron_ttrace.trace import files, owned
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.records import Kind, Outcome, Summary, Verdict
from megatron_ttrace.trace.sealing import checksum_of, seal_json
from tests.report.synthetic_report import make_summary, make_verdict

Check = tuple[Summary, list[Verdict]]


def write(check: Check, directory: Path) -> None:
    """The files of a finished check."""
    files.write_records(directory / files.VERDICTS, check[1])
    files.write_summary(directory / files.SUMMARY, check[0])


def visible(folder: Path) -> list[str]:
    """The content of a folder, without locks and manifests."""
    others = re.compile(rf".*\.lock|{owned.MANIFEST.pattern}|{owned.IGNORE}")
    return sorted(p.name for p in folder.iterdir() if not others.fullmatch(p.name))


def test_round_trip(diverged: Check, tmp_path: Path) -> None:
    """What was written is read back, in order."""
    write(diverged, tmp_path)
    summary, verdicts = files.load_report(tmp_path)
    assert summary == diverged[0]
    assert verdicts == diverged[1]
    assert visible(tmp_path) == ["summary.json", "verdicts.jsonl"]


def test_infinities_travel(tmp_path: Path) -> None:
    """The files are strict JSON, infinities and NaN come back."""
    verdict = make_verdict(verdict=Outcome.NONFINITE, rel_err=math.inf)
    write((make_summary([verdict]), [verdict]), tmp_path)
    assert files.load_report(tmp_path)[1] == [verdict]
    json.loads((tmp_path / files.VERDICTS).read_text(), parse_constant=pytest.fail)


def test_a_summary_takes_any_configuration(tmp_path: Path) -> None:
    """Configuration and timings may hold NaN, paths and tuples; the file stays JSON."""
    summary = make_summary([make_verdict()])
    summary.config.update(path=Path("/x"), ratio=math.nan, sizes=(1, 2))
    write((summary, [make_verdict()]), tmp_path)
    json.loads((tmp_path / files.SUMMARY).read_text(), parse_constant=pytest.fail)
    assert files.load_report(tmp_path)[0].config["sizes"] == [1, 2]


@given(name=st.text(st.characters(codec=None), max_size=60), note=st.text(max_size=30))
def test_any_name_survives(name: str, note: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Names are kept as they are, line separators and lone surrogates included."""
    folder = tmp_path_factory.mktemp("names")
    verdict = make_verdict(name, Kind.OUTPUT, note=note)
    write((make_summary([verdict, verdict]), [verdict, verdict]), folder)
    assert files.load_report(folder)[1] == [verdict, verdict]
    assert (folder / files.VERDICTS).read_bytes().count(b"\n") == 2


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / files.SUMMARY).unlink(), "summary.json does not exist"),
        (lambda d: (d / files.VERDICTS).unlink(), "verdicts.jsonl does not exist"),
        (lambda d: _cut(d / files.VERDICTS, 10), "verdicts.jsonl is damaged"),
        (lambda d: _cut(d / files.SUMMARY, 30), "summary.json is cut off or not JSON"),
        (lambda d: _replace(d, b'{"a": 1}\n'), "line 1 is not a verdict"),
        (lambda d: _replace(d, b"[1]\n"), "line 1 is not a verdict"),
        (lambda d: _replace(d, b"\xff\xfe\n"), "line 1 is not a verdict"),
        (lambda d: _replace(d, b"[" * 99999 + b"\n"), "line 1 is not a verdict"),
        (lambda d: _replace(d, b""), r"disagree \(0 verdicts are"),
        (lambda d: (d / files.SUMMARY).write_text("{}"), "is not a ttrace summary"),
        (lambda d: (d / files.SUMMARY).write_text("[]"), "is not a ttrace summary"),
        (lambda d: _edit(d / files.SUMMARY, counts=[1]), "summary.json is damaged"),
        (lambda d: _reseal(d / files.SUMMARY, counts=[1]), "is not a ttrace summary"),
        (lambda d: _reseal(d / files.SUMMARY, run="a"), "is not a ttrace summary"),
        (lambda d: files.write_records(d / files.VERDICTS, [], "a"), "jsonl is damaged"),
        (lambda d: _candidate(d, "0" * 16), "and the candidate of run 0000000000000000"),
    ],
)
def test_damaged_files_are_named(damage: object, message: str, diverged: Check, tmp_path: Path):
    """One line: which file, what is wrong with it, what to do."""
    write(diverged, tmp_path)
    assert callable(damage)
    damage(tmp_path)
    with pytest.raises(TTraceError, match=message) as caught:
        files.load_report(tmp_path)
    assert "\n" not in str(caught.value)
    assert "run the check again" in str(caught.value) or "give " in str(caught.value)


def _cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:-size])


def _edit(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def _reseal(path: Path, **fields: object) -> None:
    path.write_text(seal_json(json.loads(path.read_text()) | fields))


def _replace(directory: Path, verdicts: bytes) -> None:
    """Other verdicts, with their checksum in the summary."""
    (directory / files.VERDICTS).write_bytes(verdicts)
    _reseal(directory / files.SUMMARY, files={files.VERDICTS: checksum_of(verdicts)})


def _candidate(directory: Path, run: str) -> None:
    (directory / "candidate").mkdir()
    (directory / "candidate" / "meta.json").write_text(seal_json({"run": run}))


def test_the_answer_of_one_run(diverged: Check, tmp_path: Path) -> None:
    """The launcher takes no other run's summary, and none without its verdicts."""
    publish(*diverged, tmp_path, wandb=False, run_id="a" * 16)
    assert files.answer_of(tmp_path, "a" * 16) == diverged[0]
    assert files.run_of(tmp_path) == "a" * 16
    assert (
        '<meta name="ttrace-run" content="aaaaaaaaaaaaaaaa">' in (tmp_path / files.HTML).read_text()
    )
    with pytest.raises(TTraceError, match="is of a different run"):
        files.answer_of(tmp_path, "b" * 16)
    _cut(tmp_path / files.VERDICTS, 1)
    with pytest.raises(TTraceError, match="is damaged"):
        files.answer_of(tmp_path, "a" * 16)
    (tmp_path / files.VERDICTS).unlink()
    with pytest.raises(TTraceError, match="cannot be read"):
        files.answer_of(tmp_path, "a" * 16)


def test_no_directory(tmp_path: Path) -> None:
    """A path that is not a directory is refused."""
    with pytest.raises(TTraceError, match="is not a directory"):
        files.load_report(tmp_path / "nowhere")


def test_an_unwritable_directory_is_an_error(healthy: Check, tmp_path: Path) -> None:
    """The files of the contract are not optional (a file in the way fails for root too)."""
    (tmp_path / "blocked").write_text("")
    with pytest.raises(TTraceError, match="cannot"):
        publish(*healthy, tmp_path / "blocked", wandb=False)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    """Half a report is worse than yesterday's."""
    path = tmp_path / "v"
    files.write_records(path, [make_verdict()])
    before = path.read_bytes()

    def broken() -> object:
        yield make_verdict()
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        files.write_records(path, broken())  # type: ignore[arg-type]
    assert path.read_bytes() == before
    assert visible(tmp_path) == ["v"]
