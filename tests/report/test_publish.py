# SPDX-License-Identifier: Apache-2.0
"""publish() and ``ttrace report``: all files, and sinks that fail open."""

from __future__ import annotations

import argparse
import io
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from rich.console import Console

from megatron_ttrace.cli import report as cli
from megatron_ttrace.report import html, junit, publish, table, tensorboard
from megatron_ttrace.trace import files, owned
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.records import Outcome, Result, Summary, Verdict
from tests.report.synthetic_report import make_summary, make_verdict
from tests.trace.test_sanitise import HOSTILE, check_with

Check = tuple[Summary, list[Verdict]]
ROOT = Path(__file__).parents[2]


class Writer:
    """A SummaryWriter that remembers."""

    def __init__(self) -> None:
        self.scalars: dict[tuple[str, int], float] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.scalars[(tag, global_step)] = scalar_value


def published(check: Check, directory: Path, **options: object) -> str:
    """The printed report."""
    file = io.StringIO()
    publish(*check, directory, console=Console(file=file), wandb=False, **options)  # type: ignore[arg-type]
    return file.getvalue()


def test_all_files_are_written(diverged: Check, tmp_path: Path) -> None:
    """What the contract names, and what was asked for."""
    writer = Writer()
    published(diverged, tmp_path / "new" / "dir", junit=True, tensorboard=writer)
    names = {path.name for path in (tmp_path / "new" / "dir").iterdir()}
    names = {name for name in names if not owned.MANIFEST.match(name)}
    assert names == {*("verdicts.jsonl", "summary.json", "report.html", "junit.xml"), owned.IGNORE}
    assert files.load_report(tmp_path / "new" / "dir") == diverged
    assert writer.scalars[("ttrace/failures", 1)] == 809


def test_the_documented_example(
    diverged: Check,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """docs/reports.md reads a report through the public API."""
    published(diverged, tmp_path / "ttrace-out")
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "reports.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    exec(compile(example, "docs/reports.md", "exec"), {})
    assert capsys.readouterr().out.splitlines() == [
        "diverged ['embedding.word_embeddings']",
        "809 tensors fail, worst margin 51.2",
    ]


def test_a_broken_sink_is_loud_and_harmless(
    diverged: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page fails, the rest of the report is there, and a line says so."""

    def broken(*_: object) -> None:
        raise RuntimeError("no template \x1b[31m[bold]")

    monkeypatch.setattr(html, "write", broken)
    text = published(diverged, tmp_path)
    assert "WARNING: report.html failed" in text
    assert "\x1b" not in text
    assert "culprit    embedding.word_embeddings" in text
    assert (tmp_path / files.SUMMARY).exists()


def test_a_killed_write_leaves_no_mixture(
    diverged: Check, healthy: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verdicts of this check never stand beside the summary of the last one."""
    published(healthy, tmp_path)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "write_summary", killed)
    with pytest.raises(KeyboardInterrupt):
        published(diverged, tmp_path)
    with pytest.raises(TTraceError, match=r"summary\.json does not exist"):
        files.load_report(tmp_path)


def test_tensorboard_scalars(conflict: Check) -> None:
    """Worst margin overall and per layer."""
    writer = Writer()
    tensorboard.log(*conflict, writer)
    assert writer.scalars[("ttrace/failures", 1)] == 1
    worst = writer.scalars[("ttrace/worst_margin", 1)]
    assert worst == pytest.approx(88.75)
    assert writer.scalars[("ttrace/margin/decoder.final_layernorm", 1)] == worst
    assert writer.scalars[("ttrace/margin/decoder.layers.0", 1)] < 1


def test_tensorboard_has_no_infinities() -> None:
    """A missing layer is a huge margin, since nothing draws infinities."""
    writer = Writer()
    verdicts = [make_verdict(verdict=Outcome.MISSING, rel_err=None, tolerance=None, iteration=7)]
    tensorboard.log(make_summary(verdicts), verdicts, writer)
    assert writer.scalars[("ttrace/worst_margin", 7)] == table.UNMEASURED_MARGIN


def test_tensorboard_tags_are_harmless() -> None:
    """A tag is one printable line, whatever a module is called."""
    for name in HOSTILE:
        writer = Writer()
        tensorboard.log(*check_with(name, name), writer)
        tags = [tag for tag, _ in writer.scalars]
        assert len(tags) > 3
        assert all(tag.isprintable() and len(tag) <= 100 for tag in tags)


def test_junit_cases(conflict: Check, healthy: Check) -> None:
    """One case per layer and direction; the failing one carries the culprit."""
    suite = ET.fromstring(junit.render(*conflict))
    failures = suite.findall("testcase/failure")
    assert len(failures) == 1
    lines = (failures[0].text or "").splitlines()
    assert "cause: replicas differ and sum to the reference" in lines
    assert "hint: a partial sum over tp was never reduced" in lines
    assert any(line.startswith("look at: finalize_model_grads in megatron/") for line in lines)
    cases = {(case.get("classname"), case.get("name")) for case in suite.iter("testcase")}
    assert ("ttrace.decoder.layers.0", "backward") in cases
    assert suite.get("tests") == str(len(cases))
    assert not ET.fromstring(junit.render(*healthy)).findall(".//failure")


def test_junit_reports_no_answer_as_an_error() -> None:
    """CI must not be green when nothing was checked."""
    summary = Summary(Result.COULD_NOT_CHECK, {}, (), {}, {}, {}, (), ("no reference",))
    suite = ET.fromstring(junit.render(summary, []))
    assert suite.get("errors") == "1"
    assert suite.find("testcase/error").get("message") == "no reference"  # type: ignore[union-attr]


def arguments(*words: str) -> argparse.Namespace:
    """A command line as ``ttrace`` parses it."""
    parser = argparse.ArgumentParser(prog="ttrace")
    cli.add_parser(parser.add_subparsers())
    return parser.parse_args(["report", *words])


@pytest.mark.parametrize(("fixture", "code"), [("healthy", 0), ("diverged", 1)])
def test_command(
    fixture: str,
    code: int,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same report again from the files, with the contract's exit code."""
    check: Check = request.getfixturevalue(fixture)
    text = published(check, tmp_path)
    args = arguments(
        str(tmp_path), "--html", str(tmp_path / "h.html"), "--junit", str(tmp_path / "j.xml")
    )
    assert args.run(args) == code
    assert capsys.readouterr().out == text
    assert (tmp_path / "h.html").read_text() == (tmp_path / "report.html").read_text()
    ET.parse(tmp_path / "j.xml")


def test_command_for_machines(
    diverged: Check, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--json prints strict JSON and nothing else."""
    published(diverged, tmp_path)
    args = arguments(str(tmp_path), "--json")
    assert args.run(args) == 1
    data = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert data["culprits"][0]["name"] == "embedding.word_embeddings"
    assert data["layers"][0]["failures"] == 80


def test_command_without_a_report(tmp_path: Path) -> None:
    """The error is for the caller to print; it names the file."""
    args = arguments(str(tmp_path))
    with pytest.raises(TTraceError, match=r"summary\.json does not exist"):
        args.run(args)


def test_exit_codes() -> None:
    """The contract."""
    assert [int(result.exit_code) for result in Result] == [0, 1, 2]


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    """Every command's help shows how it is typed."""
    with pytest.raises(SystemExit):
        arguments("--help")
    assert "ttrace report ttrace-out" in capsys.readouterr().out


def test_a_closed_log_does_not_raise(diverged: Check, tmp_path: Path) -> None:
    """The files are there even when nobody can be told."""
    file = io.StringIO()
    console = Console(file=file)
    file.close()
    publish(*diverged, tmp_path, console=console, wandb=False)
    assert files.load_report(tmp_path) == diverged


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_reader_may_leave_early(flags: list[str], diverged: Check, tmp_path: Path) -> None:
    """``ttrace report DIR | head -1``: no traceback, and still the check's exit code."""
    published(diverged, tmp_path)
    code = (
        "import argparse, sys; from megatron_ttrace.cli import report as cli\n"
        "p = argparse.ArgumentParser(); cli.add_parser(p.add_subparsers())\n"
        "a = p.parse_args(['report', *sys.argv[1:]]); sys.stdin.read(1); sys.exit(a.run(a))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), *flags],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, errors = process.communicate(b"x")
    assert process.returncode == 1
    assert errors == b""


def test_a_closed_pipe_does_not_end_the_job(diverged: Check, tmp_path: Path) -> None:
    """rich raises SystemExit there; a training job must not see it."""

    class Closed(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError

    console = Console(file=Closed())
    console.on_broken_pipe = lambda: sys.exit(1)  # type: ignore[method-assign]
    publish(*diverged, tmp_path, console=console, wandb=False)
    assert files.load_report(tmp_path) == diverged
