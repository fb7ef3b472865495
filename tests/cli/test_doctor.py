# SPDX-License-Identifier: Apache-2.0
"""``ttrace doctor`` on this machine, and on machines that lack something."""

import json
import os
from argparse import ArgumentParser, Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_ttrace.cli import doctor
from megatron_ttrace.cli.main import build_parser
from megatron_ttrace.mcore.versions import MAIN, SUPPORTED
from megatron_ttrace.trace.errors import TTraceError
from tests.integration.jobs import ttrace

SUBJECTS = {
    *("Python", "torch", "megatron-core", "GPU", "disk", "options", "comparison"),
    *("TransformerEngine", "Apex", "Megatron-Bridge", "transformers", "wandb", "TensorBoard"),
    "checks",
}


def test_this_machine(tmp_path: Path) -> None:
    """All subjects on one screen, without warnings of other packages."""
    done = ttrace("doctor", cwd=tmp_path, code=0)
    assert done.stderr == ""
    assert all(subject in done.stdout for subject in SUBJECTS)
    assert len(done.stdout.splitlines()) <= 24


def test_what_is_missing_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without Megatron no check can run: exit code 2, and what to install."""

    def absent() -> None:
        raise TTraceError("megatron-core is not installed: pip install 'megatron-core==0.19.2'")

    monkeypatch.setattr(doctor.versions, "check_supported", absent)
    monkeypatch.setattr(doctor, "_OPTIONAL", {})
    assert doctor.run(Namespace(json=True, online=False)) == 2
    rows = {row["subject"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["megatron-core"]["state"] == "missing"
    assert "pip install" in rows["megatron-core"]["found"]
    assert rows["checks"]["advice"] == "first fix megatron-core"


@pytest.mark.parametrize("is_broken", [False, True])
def test_warnings_of_libraries(
    is_broken: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A compiled library's are shown below the table, and only if something required is missing."""

    def noisy() -> doctor.Finding:
        os.write(2, b"[W] no driver \x1b[31m\n")
        if is_broken:
            raise OSError("libcudart.so.13")
        return doctor.Finding("torch", "ok", "2.15")

    monkeypatch.setattr(doctor, "_NEEDED", {"torch": noisy})
    monkeypatch.setattr(doctor, "_OPTIONAL", {})
    monkeypatch.setattr(doctor, "_checks", lambda broken: doctor.Finding("checks", "ok", ""))
    assert doctor.run(Namespace(json=False, online=False)) == 2 * is_broken
    printed = capfd.readouterr()
    assert "torch" in printed.out
    assert printed.err.startswith("[W] no driver ") == is_broken
    assert bool(printed.err) == is_broken
    assert "\x1b" not in printed.err


def test_a_machine_with_nothing_gets_an_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No torch, or one whose libraries do not load: one finding each, and no traceback."""

    def broken(name: str) -> None:
        raise OSError(f"{name}: libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(doctor, "importlib", SimpleNamespace(import_module=broken))
    assert doctor.run(Namespace(json=True, online=False)) == 2
    rows = {row["subject"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(rows) == SUBJECTS
    assert rows["torch"]["state"] == rows["checks"]["state"] == "missing"
    assert "libcudart" in rows["torch"]["found"]
    assert rows["GPU"]["state"] == "optional"


def test_new_options_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a Megatron that is newer than the table."""

    def registered(parser: ArgumentParser) -> ArgumentParser:
        parser.add_argument("--bf16")
        parser.add_argument("--from-the-future")
        return parser

    module = SimpleNamespace(add_megatron_arguments=registered)
    monkeypatch.setattr(doctor, "importlib", SimpleNamespace(import_module=lambda _: module))
    finding = doctor._options()
    assert finding.state == "optional"
    assert finding.found == "1 of 2 of Megatron's are new: --from-the-future"


def pretend(monkeypatch: pytest.MonkeyPatch, gpus: int, *, nccl: bool, gloo: bool = True) -> None:
    """A machine with this many GPUs and these backends."""
    properties = SimpleNamespace(name="NVIDIA H200", total_memory=141 << 30)
    modules = {
        "torch": SimpleNamespace(
            __version__="2.15.0",
            cuda=SimpleNamespace(
                device_count=lambda: gpus, get_device_properties=lambda _: properties
            ),
        ),
        "torch.distributed": SimpleNamespace(
            is_available=lambda: True,
            is_gloo_available=lambda: gloo,
            is_nccl_available=lambda: nccl,
        ),
    }
    monkeypatch.setattr(doctor, "importlib", SimpleNamespace(import_module=modules.__getitem__))


def test_what_will_run_where(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs if there are any, otherwise the CPU; missing backends are reported."""
    pretend(monkeypatch, 0, nccl=False)
    assert "CPU over gloo" in doctor._checks([]).found
    pretend(monkeypatch, 8, nccl=True)
    assert doctor._device().found == "8 x NVIDIA H200, 141 GiB"
    assert "up to 8 ranks on GPUs" in doctor._checks([]).found
    pretend(monkeypatch, 8, nccl=False)
    assert "no NCCL" in doctor._device().advice
    pretend(monkeypatch, 0, nccl=False, gloo=False)
    assert doctor._torch().state == "missing"


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
    assert doctor.newer_releases() == {}
    assert doctor._releases().state == "ok"
    pip({series: f"{version.rpartition('.')[0]}.0" for series, version in SERIES.items()})
    assert doctor.newer_releases() == {}


def test_newer_releases(pip) -> None:
    """A patch with two digits, and the first release of the series that main is."""
    series = NEW.rpartition(".")[0]
    pip(SERIES | {f"{series}.*": f"{series}.10", f"{MAIN.rpartition('.')[0]}.*": MAIN})
    assert doctor.newer_releases() == {NEW: f"{series}.10", MAIN: MAIN}
    finding = doctor._releases()
    assert finding.state == "optional"
    assert f"{series}.10 (tested: {NEW})" in finding.found


def test_no_answer(pip) -> None:
    """pip's last line is the reason; nothing is claimed about releases."""
    pip({})
    with pytest.raises(TTraceError, match=r"No matching distribution found for megatron-core=="):
        doctor.newer_releases()
    assert doctor._attempt("releases", doctor._releases, "optional").state == "optional"


def test_doctor_asks_only_if_told(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Without ``--online`` no process is started."""
    asked = []
    monkeypatch.setattr(doctor, "newer_releases", lambda: asked.append(1) or {})
    monkeypatch.setattr(doctor, "_OPTIONAL", {})
    for words, expected in (([], 0), (["--online"], 1)):
        doctor.run(build_parser(["doctor"]).parse_args(["doctor", *words]))
        assert len(asked) == expected
