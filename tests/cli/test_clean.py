# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from megatron_ttrace.cli.main import build_parser
from megatron_ttrace.trace import cleaning, owned, shared


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A working directory with a run in ``ttrace-out``."""
    monkeypatch.chdir(tmp_path)
    with shared.claim(tmp_path / "ttrace-out"):
        owned.write(tmp_path / "ttrace-out" / "report.html", ["<html>"])
    return tmp_path


def clean(*words):
    args = build_parser().parse_args(["clean", *words])
    return args.run(args)


def test_it_lists_and_removes_only_when_told(home, capsys):
    """Without --yes nothing changes, and it says so."""
    assert clean() == 0
    printed = capsys.readouterr()
    assert "run         ttrace-out" in printed.out
    assert "add --yes" in printed.err
    assert (home / "ttrace-out" / "report.html").exists()
    assert clean("--yes") == 0
    assert "removed" in capsys.readouterr().out
    assert not (home / "ttrace-out").exists()


def test_a_run_in_a_run(home, capsys):
    """Each file counts once, whatever directories are named, and nothing is left of either."""
    place = home / "ttrace-out"
    alone = cleaning.find(place)[0].bytes
    with shared.claim(place / "against"):
        owned.write(place / "against" / "report.html", ["<html>"] * 1000)
    assert cleaning.find(place)[0].bytes == alone
    assert clean("ttrace-out/against", "ttrace-out", "./ttrace-out", "--yes") == 0
    printed = capsys.readouterr().out
    assert printed.count("  removed\n") == 2
    assert "\n2 in " in printed
    assert not place.exists()


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("foreign", [False, True])
def test_a_report_of_two_traces(home, made, foreign):
    """Found by its summary; what is not ours stays."""
    place = home / "diff"
    if not made:
        place.mkdir()
    with shared.claim_report(place, "0" * 16):
        owned.write(place / "summary.json", ["{}"])
    if foreign:
        (place / "mine.txt").touch()
    assert clean("diff", "--yes") == 0
    left = [path.name for path in place.iterdir()] if place.exists() else []
    assert [name for name in left if not owned.MANIFEST.match(name)] == ["mine.txt"] * foreign
    assert place.exists() is (foreign or not made)


def test_newer_ones_are_left_out(home, capsys):
    assert clean("--older-than", "1", "--yes") == 0
    assert capsys.readouterr().out == "nothing of ttrace in ttrace-out\n"
    assert (home / "ttrace-out").exists()


def test_json(home, capsys):
    assert clean("--json") == 0
    [row] = json.loads(capsys.readouterr().out)
    assert (row["path"], row["sort"], row["state"]) == ("ttrace-out", "run", "found")
