# SPDX-License-Identifier: Apache-2.0
"""Newer releases, as a pip that stands in for the real one reports them."""

from pathlib import Path

import pytest

from megatron_ttrace.cli import doctor
from megatron_ttrace.jobs import index
from megatron_ttrace.mcore.versions import MAIN, SUPPORTED
from megatron_ttrace.trace.errors import TTraceError

PIP = """
import json, sys
assert "--dry-run" in sys.argv and "--no-deps" in sys.argv
newest = {newest}
package, _, wanted = sys.argv[-1].partition("==")
assert package == "megatron-core"
if wanted not in newest:
    sys.exit("WARNING: something\\nERROR: No matching distribution found for " + sys.argv[-1])
print(json.dumps({{"install": [{{"metadata": {{"version": newest[wanted]}}}}]}}))
"""


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes a pip that knows these newest releases."""

    def write(newest: dict[str, str]) -> None:
        (tmp_path / "pip").mkdir(exist_ok=True)
        (tmp_path / "pip" / "__init__.py").touch()
        (tmp_path / "pip" / "__main__.py").write_text(PIP.format(newest=newest))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return write


OLD, NEW = SUPPORTED
SERIES = {f"{version.rpartition('.')[0]}.*": version for version in SUPPORTED}


def test_nothing_newer(pip) -> None:
    """The index has what is supported, or took the newest release back."""
    pip(SERIES)
    assert index.newer_patches() == {}
    assert doctor._releases().state == "ok"
    pip({series: f"{version.rpartition('.')[0]}.0" for series, version in SERIES.items()})
    assert index.newer_patches() == {}


def test_newer_releases(pip) -> None:
    """A patch with two digits, and the first release of the series that main is."""
    series = NEW.rpartition(".")[0]
    pip(SERIES | {f"{series}.*": f"{series}.10", f"{MAIN.rpartition('.')[0]}.*": MAIN})
    assert index.newer_patches() == {NEW: f"{series}.10", MAIN: MAIN}
    found = doctor._releases()
    assert found.state == "optional"
    assert f"{series}.10 (tested: {NEW})" in found.found


def test_no_answer(pip) -> None:
    """pip's last line is the reason; nothing is claimed about releases."""
    pip({})
    with pytest.raises(TTraceError, match=r"No matching distribution found for megatron-core=="):
        index.newer_patches()
    assert doctor._attempt("releases", doctor._releases, "optional").state == "optional"


def test_doctor_asks_only_if_told(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Without ``--online`` no process is started."""
    asked = []
    monkeypatch.setattr(index, "newer_patches", lambda: asked.append(1) or {})
    monkeypatch.setattr(doctor, "_OPTIONAL", {})
    for words, expected in (([], 0), (["--online"], 1)):
        parser = doctor.add_parser(doctor.argparse.ArgumentParser().add_subparsers())
        doctor.run(parser.parse_args(words))
        assert len(asked) == expected
