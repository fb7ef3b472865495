# SPDX-License-Identifier: Apache-2.0
"""W&B, offline: what was logged is read back from the run's files."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ttrace.evaluation.nightly import history
from megatron_ttrace.evaluation.nightly import wandb as sink
from megatron_ttrace.evaluation.nightly.records import Night
from tests.evaluation.nightly.synthetic import month
from tests.report.wandb_file import records

wandb = pytest.importorskip("wandb")


@pytest.fixture(autouse=True)
def no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No key, no mode, no settings of the machine's owner."""
    for name in ("API_KEY", "MODE", "PROJECT", "IDENTITY_TOKEN_FILE", "BASE_URL", "RUN_ID"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    yield
    assert wandb.run is None, "a run was left open"


def logged(
    nights: list[Night], directory: Path
) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    """The table, the summary fields and the alerts of a night that was logged offline."""
    said = history.changes(nights[-1], nights[0])
    line = sink.log(nights[-1], said, directory=directory, online=False)
    assert "offline run" in line
    (folder,) = (directory / "wandb").glob("offline-run-*")
    (table,) = (folder / "files/media/table").glob("ttrace_nightly_*.table.json")
    (path,) = folder.glob("*.wandb")
    fields: dict[str, Any] = {}
    alerts = []
    for record in records(path):
        if record.WhichOneof("record_type") == "summary":
            for item in record.summary.update:
                fields[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
        elif record.WhichOneof("record_type") == "alert":
            alerts.append(record.alert)
    return json.loads(table.read_text()), fields, alerts


@pytest.mark.slow
def test_a_bad_night(tmp_path: Path) -> None:
    """A row per case, summary fields, and one alert that says what changed."""
    table, fields, alerts = logged(month(3), tmp_path)
    assert table["columns"] == list(sink.COLUMNS)
    assert len(table["data"]) == len(month(3)[-1].cases)
    assert table["data"][0][:3] == ["bugs", "01 tp-embedding-mask [TP 2]", "missed"]
    assert fields["nightly/exit_code"] == 2
    assert fields["nightly/bugs/missed"] == 1
    assert fields["nightly/weakest_culprit_margin"] == pytest.approx(5.3)
    (alert,) = alerts
    assert alert.title == "ttrace nightly: 1 missed"
    assert "torch: 2.15.0 -> 2.16.0" in alert.text


@pytest.mark.slow
def test_a_good_night_alerts_nobody(tmp_path: Path) -> None:
    """No alert."""
    _, fields, alerts = logged(month(3)[:2], tmp_path)
    assert fields["nightly/exit_code"] == 0
    assert alerts == []


def test_it_never_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A night is complete whatever W&B does."""

    def fail(*_: object, **__: object) -> str:
        raise RuntimeError("no\nspace")

    monkeypatch.setattr(sink, "_log", fail)
    line = sink.log(month(1)[0], [], directory=tmp_path, online=False)
    assert line.startswith("ttrace: WARNING: W&B logging failed")
    assert "\n" not in line
