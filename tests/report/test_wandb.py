# SPDX-License-Identifier: Apache-2.0
"""W&B, offline: what was logged is read back from the run's files."""

import http.server
import io
import json
import sys
import threading
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from megatron_ttrace.cli.main import main
from megatron_ttrace.report import html, publish
from megatron_ttrace.report import wandb as sink
from tests import programs
from tests.report.expected import Check
from tests.report.wandb_file import OfflineRun, no_account  # noqa: F401
from tests.trace.test_sanitise import HOSTILE, check_with

wandb = pytest.importorskip("wandb")
pytestmark = pytest.mark.usefixtures("no_account")


def test_own_run(diverged: Check, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Table, chart, page, summary and one alert, in an offline run of our own."""
    html.write(tmp_path / "report.html", *diverged)
    line = sink.log(*diverged, tmp_path / "report.html", directory=tmp_path, online=True)
    run = OfflineRun(tmp_path)
    assert str(run.folder) in line
    assert "\n" not in line
    assert "wandb:" not in "".join(capfd.readouterr())

    tables = run.tables()
    table = tables["ttrace_verdicts"]
    assert table["columns"] == list(sink.COLUMNS)
    first = "decoder.layers.3 forward diverged self_attention.core_attention input.0"
    assert " ".join(table["data"][0][:4]) == first
    assert len(table["data"]) > 20
    chart = tables["ttrace_worst_margin_per_layer_table"]["data"]
    assert [row[0] for row in chart][:3] == ["tokens", "embedding", "decoder.layers.0"]
    assert list((run.folder / "files/media/html").glob("ttrace_report*.html"))

    (alert,) = run.alerts()
    assert alert.title == "ttrace: embedding.word_embeddings diverges (forward)"
    for part in ("forward", "ranks 1,3", "13× its tolerance", "vocabulary mask"):
        assert part in alert.text

    fields = run.summary()
    assert fields["ttrace/verdict"] == "diverged"
    assert fields["ttrace/failures"] == 809
    assert fields["ttrace/worst_margin"] == pytest.approx(51.25, rel=0.01)
    assert fields["ttrace/culprit"] == "embedding.word_embeddings"


def test_a_finished_check(
    diverged: Check, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``ttrace report --wandb`` logs it; standard output stays JSON for a program."""
    publish(*diverged, tmp_path, console=Console(file=io.StringIO()))
    assert not (tmp_path / "wandb").exists()
    assert main(["report", str(tmp_path), "--json", "--wandb"]) == 1
    captured = capsys.readouterr()
    run = OfflineRun(tmp_path)
    assert str(run.folder) in captured.err
    assert json.loads(captured.out)["verdict"] == run.summary()["ttrace/verdict"] == "diverged"


def is_harmless(text: str) -> bool:
    """Bounded, and nothing but what can be printed on a line."""
    unsafe = {"Cc", "Cf", "Cs", "Zl", "Zp", "Co"}
    return len(text) <= 1500 and not {unicodedata.category(c) for c in text} & unsafe


def texts_of(value: object) -> Iterator[str]:
    """All strings of a JSON value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (text for pair in value.items() for part in pair for text in texts_of(part))
    elif isinstance(value, list):
        yield from (text for part in value for text in texts_of(part))


def test_hostile_names(tmp_path: Path) -> None:
    """Table, chart, summary, configuration and alert hold clean texts; the page is whole."""
    summary, verdicts = check_with(*zip(HOSTILE, HOSTILE, strict=True))
    summary.config["ratio"] = float("nan")
    html.write(tmp_path / "report.html", summary, verdicts)
    line = sink.log(summary, verdicts, tmp_path / "report.html", directory=tmp_path, online=True)
    assert line.startswith("W&B: logged to an offline run")
    run = OfflineRun(tmp_path)
    (page,) = (run.folder / "files/media/html").glob("ttrace_report*.html")
    assert page.read_text() == (tmp_path / "report.html").read_text()
    (alert,) = run.alerts()
    tables = run.tables()
    config = [
        (item.key, item.value_json)
        for record in run.records()
        for item in [*record.run.config.update, *record.config.update]
    ]
    assert any(key == "layout" for key, _ in config)
    texts = [alert.title, alert.text, *texts_of(run.summary()), *texts_of(tables)]
    texts += [text for _, value in config for text in texts_of(json.loads(value))]
    assert len(texts) > 100
    assert not [text for text in texts if not is_harmless(text)]


def test_a_pass_alerts_nobody(healthy: Check, tmp_path: Path) -> None:
    """No alert, no page when none was written, margins below one."""
    sink.log(*healthy, tmp_path / "report.html", directory=tmp_path, online=True)
    run = OfflineRun(tmp_path)
    assert run.alerts() == []
    fields = run.summary()
    assert fields["ttrace/verdict"] == "equivalent"
    assert fields["ttrace/worst_margin"] < 1


@pytest.mark.parametrize("how", ["run", "active"])
def test_a_given_run_is_used_and_left_open(how: str, conflict: Check, tmp_path: Path) -> None:
    """Megatron's own run gets the report, keeps its steps, and is not finished."""
    run = wandb.init(dir=str(tmp_path), mode="offline", settings=wandb.Settings(silent=True))
    try:
        run.log({"loss": 3.0}, step=1)
        passed = {"run": run, "active": None}[how]
        line = sink.log(*conflict, tmp_path / "none", run=passed, directory=tmp_path / "other")
        assert "offline run" in line
        assert wandb.run is run
        run.log({"loss": 2.0}, step=2)
    finally:
        run.finish()
    assert not (tmp_path / "other").exists()
    run = OfflineRun(tmp_path)
    assert len(run.alerts()) == 1
    assert "ttrace_verdicts" in run.tables()
    steps = [r.history.step.num for r in run.records() if r.history.item]
    assert steps == [1, 2]


class Broken:
    """A run whose every use fails."""

    def __getattr__(self, name: str) -> object:
        raise ConnectionError(f"no {name}\n\x1b[31m")


def test_errors_become_a_loud_line(diverged: Check, tmp_path: Path) -> None:
    """A report must not kill a training job."""
    line = sink.log(*diverged, tmp_path / "none", run=Broken(), directory=tmp_path)
    assert "WARNING: W&B logging failed" in line
    assert "\n" not in line
    assert "\x1b" not in line


def test_without_wandb(diverged: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation without wandb gets a line, not a traceback."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    line = sink.log(*diverged, tmp_path / "none", directory=tmp_path, online=True)
    assert "wandb cannot be imported" in line


def test_waiting_is_bounded(
    healthy: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever hangs inside wandb is left behind."""
    release = threading.Event()
    monkeypatch.setattr(sink, "TOTAL_SECONDS", 0.2)
    monkeypatch.setattr(wandb, "init", lambda **_: release.wait(20))
    line = sink.log(*healthy, tmp_path / "none", directory=tmp_path, online=True)
    release.set()
    # On a busy machine it may not have come as far as the call that is replaced.
    for left in (thread for thread in threading.enumerate() if thread.name == "ttrace-wandb"):
        left.join(20)
    assert "WARNING" in line
    assert "WANDB_MODE=offline" in line


def test_the_mode_of_the_user_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """WANDB_MODE decides, also where there is no key."""
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert sink._mode(wandb) == (None, "")


class Counts(http.server.BaseHTTPRequestHandler):
    """A proxy that remembers whether anybody called, and answers nobody."""

    calls = 0

    def handle(self) -> None:
        type(self).calls += 1


@pytest.mark.parametrize(
    ("asked", "project", "mode", "wanted"),
    [
        (False, "", "", False),
        (True, "", "", True),
        (False, "mine", "", True),
        (False, "", "offline", True),
        (True, "mine", "disabled", False),
    ],
)
def test_who_asks_for_a_run(
    asked: bool, project: str, mode: str, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flag, a project or a mode does; a key alone may be there for other work."""
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_PROJECT", project)
    monkeypatch.setenv("WANDB_MODE", mode)
    assert sink.is_wanted(asked) == wanted


def test_a_key_and_a_server_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for goes online."""
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert sink._mode(wandb) == ("online", "")


@pytest.mark.parametrize("mode", ["", "offline"])
def test_nothing_is_sent_unasked(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own, because wandb's service reports about itself when it ends.

    Importing the report imports no wandb.
    """
    monkeypatch.setenv("WANDB_MODE", mode)
    monkeypatch.setattr(Counts, "calls", 0)
    code = (
        "import pathlib, sys, megatron_ttrace.report, megatron_ttrace.report.wandb as sink\n"
        "from tests.report.synthetic_report import healthy_verdicts, make_summary\n"
        "assert 'wandb' not in sys.modules\n"
        "found, place = healthy_verdicts(), pathlib.Path(sys.argv[1])\n"
        "print(sink.log(make_summary(found), found, place / 'none', directory=place))"
    )
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Counts) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        proxies = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
        variables = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": address}
        for name in ("WANDB_ERROR_REPORTING", "WANDB_SERVICE"):
            monkeypatch.delenv(name, raising=False)
        variables |= dict.fromkeys(proxies, address)
        done = programs.python("-c", code, tmp_path, **variables)
        server.shutdown()
    assert done.returncode == 0, done.stderr
    if mode == "offline":
        assert str(OfflineRun(tmp_path).folder) in done.stdout
    else:
        assert not done.stdout.strip()
        assert not (tmp_path / "wandb").exists()
    assert Counts.calls == 0


def test_a_key_in_netrc_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """'wandb login' writes there."""
    path = tmp_path / "rc"
    path.write_text("machine wandb.example login user password x\n")
    path.chmod(0o600)
    monkeypatch.setenv("NETRC", str(path))
    assert sink._has_key(["other.example", "wandb.example"])
    assert not sink._has_key(["other.example"])


class Refuses(http.server.BaseHTTPRequestHandler):
    """A server that is there, and does not want us."""

    def do_GET(self) -> None:
        self.send_error(404)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_error(401)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("answers", [True, False])
def test_a_server_that_is_of_no_use_leaves_an_offline_run(
    answers: bool, healthy: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither an expired key nor a server that never answers stops a job, or holds it up."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as server:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        monkeypatch.setattr(sink, "INIT_SECONDS", 2.0 if answers else 1.0)
        if answers:
            threading.Thread(target=server.serve_forever, daemon=True).start()
        line = sink.log(*healthy, tmp_path / "none", directory=tmp_path, online=True)
        if answers:
            server.shutdown()
    assert "WARNING: online logging failed" in line
    assert str(OfflineRun(tmp_path).folder) in line
    assert "ttrace_verdicts" in OfflineRun(tmp_path).tables()
    assert "\n" not in line


def test_the_path_is_one_word(tmp_path):
    """A command to copy: a folder may have spaces in its name."""
    (tmp_path / "wandb" / "offline-run-a b").mkdir(parents=True)
    line = sink.left_offline(tmp_path, 0.0)
    assert line.endswith(f"wandb sync '{tmp_path}/wandb/offline-run-a b'")
