# SPDX-License-Identifier: Apache-2.0
"""publish() and ``ttrace report``: all files, and sinks that fail open."""

import io
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from rich.console import Console

from megatron_ttrace.cli.main import main
from megatron_ttrace.report import html, log_scalars, prepare, publish
from megatron_ttrace.trace import files, owned
from megatron_ttrace.trace.errors import TTraceError
from tests.report.expected import Check, Writer, published
from tests.trace.test_sanitise import HOSTILE, check_with

ROOT = Path(__file__).parents[2]


def test_all_files_are_written(diverged: Check, tmp_path: Path) -> None:
    """What the contract names, and what was asked for."""
    writer = Writer()
    published(diverged, tmp_path / "new" / "dir", tensorboard=writer)
    names = {path.name for path in (tmp_path / "new" / "dir").iterdir()}
    names = {name for name in names if not owned.MANIFEST.match(name)}
    assert names == {*("verdicts.jsonl", "summary.json", "report.html"), owned.IGNORE}
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


@pytest.mark.parametrize("wandb", [False, True])
def test_what_is_prepared(wandb: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The template is compiled; W&B is imported only where it is wanted."""
    (tmp_path / "wandb.py").write_text("init = None")
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.delitem(sys.modules, "wandb")
    monkeypatch.syspath_prepend(tmp_path)
    html.template.cache_clear()
    prepare(wandb=wandb)
    assert html.template.cache_info().currsize == 1
    assert ("wandb" in sys.modules) == wandb


def test_what_cannot_be_prepared_is_reported_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken installation of W&B ends no job."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    prepare(wandb=True)


def test_tensorboard_tags_are_harmless() -> None:
    """A tag is one printable line, whatever a module is called."""
    for name in HOSTILE:
        writer = Writer()
        log_scalars(*check_with((name, name)), writer)
        tags = [tag for tag, _ in writer.scalars]
        assert len(tags) > 3
        assert all(tag.isprintable() and len(tag) <= 100 for tag in tags)


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
    pages = "--html", str(tmp_path / "h.html"), "--junit", str(tmp_path / "j.xml")
    assert main(["report", str(tmp_path), *pages]) == code
    assert capsys.readouterr().out == text
    assert (tmp_path / "h.html").read_text() == (tmp_path / "report.html").read_text()
    ET.parse(tmp_path / "j.xml")


def test_command_for_machines(
    diverged: Check, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--json prints strict JSON and nothing else."""
    published(diverged, tmp_path)
    assert main(["report", str(tmp_path), "--json"]) == 1
    data = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert data["culprits"][0]["name"] == "embedding.word_embeddings"
    assert data["layers"][0]["failures"] == 80


def test_command_without_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the file; help shows how the command is typed."""
    assert main(["report", str(tmp_path)]) == 2
    assert "summary.json does not exist" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["report", "--help"])
    assert "ttrace report ttrace-out" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_reader_may_leave_early(flags: list[str], diverged: Check, tmp_path: Path) -> None:
    """``ttrace report DIR | head -1``: no traceback, and still the check's exit code."""
    published(diverged, tmp_path)
    code = (
        "import sys; from megatron_ttrace.cli.main import main\n"
        "sys.argv.insert(1, 'report'); sys.stdin.read(1); sys.exit(main())"
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


@pytest.mark.parametrize("ending", ["closed", "broken"])
def test_a_log_that_is_gone(ending: str, diverged: Check, tmp_path: Path) -> None:
    """The files are there; rich answers a closed pipe with SystemExit, which no job must see."""

    class Broken(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError

    file = Broken()
    console = Console(file=file)
    if ending == "closed":
        file.close()
    else:
        console.on_broken_pipe = lambda: sys.exit(1)  # type: ignore[method-assign]
    publish(*diverged, tmp_path, console=console, wandb=False)
    assert files.load_report(tmp_path) == diverged
