# SPDX-License-Identifier: Apache-2.0
"""A script finds on ``sys.path`` what ``python SCRIPT`` finds there, and nothing else."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ttrace.jobs import script as scripts
from megatron_ttrace.trace.errors import TTraceError
from tests import programs

PRINT = "import json, sys\nprint(json.dumps([sys.path, sys.argv, __file__, __name__]))\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Scripts behind links, and a working directory with relative entries on the path."""
    real = tmp_path / "real"
    real.mkdir()
    (real / "train.py").write_text(PRINT)
    (tmp_path / "linked").symlink_to("real")
    (real / "first.py").symlink_to("train.py")
    (tmp_path / "second.py").symlink_to("linked/first.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "relative:")
    return tmp_path


@pytest.mark.parametrize("safe", ["", "1"])
@pytest.mark.parametrize("script", ["real/train.py", "linked/first.py", "second.py"])
def test_like_python(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str, safe: str) -> None:
    """Relative, behind links, and with PYTHONSAFEPATH; computed here and in a fresh process."""
    monkeypatch.setenv("PYTHONSAFEPATH", safe)

    def output(*words: str) -> list:
        done = subprocess.run([sys.executable, *words], capture_output=True, check=True)
        return json.loads(done.stdout)

    wanted = output(script, "a", "--b")
    assert output(*scripts.command(script)[1:], "a", "--b") == wanted
    assert scripts.search_path(script) == wanted[0]


def test_another_environment(folder: Path) -> None:
    """Of a job with variables of its own; this process's are not asked."""
    path = scripts.search_path("real/train.py", {"PYTHONPATH": "/elsewhere"})
    assert path[:2] == [str(folder / "real"), "/elsewhere"]
    assert str(folder / "relative") not in path


def package(root: Path, name: str) -> str:
    """Make ``megatron.NAME`` under a root; returns its file."""
    file = root / "megatron" / name / "__init__.py"
    file.parent.mkdir(parents=True)
    file.touch()
    return str(file)


def test_origins(tmp_path: Path) -> None:
    """Each package comes from the first entry that has it; nothing is imported."""
    first, second = tmp_path / "first", tmp_path / "second"
    core = package(first, "core")
    training = package(second, "training")
    package(second, "core")
    before = [*sys.modules]
    files = scripts.origins([str(first), str(second)])
    assert files == {"megatron.core": core, "megatron.training": training}
    assert [*sys.modules] == before
    assert scripts.origins([str(tmp_path)]) == {}


def test_shadowed(tmp_path: Path) -> None:
    """A neighbour of the script that a fork would replace by a module of the launcher."""
    script = tmp_path / "train.py"
    path = [str(tmp_path)]
    (tmp_path / "json").mkdir()  # no package: gives way to the real one
    (tmp_path / "never_imported.py").touch()
    assert scripts.shadowed(script, path) == ""
    (tmp_path / "subprocess.py").touch()
    assert scripts.shadowed(script, path) == "subprocess"
    assert scripts.shadowed(script, []) == ""


PARSER = """
import argparse
def parse_args(extra_args_provider=None):
    parser = extra_args_provider(argparse.ArgumentParser())
    return parser.parse_args()
"""
TRAIN = """
import sys
sys.path.insert(0, "tree")
from megatron.training.arguments import parse_args
try:
    parse_args()
except SystemExit:
    print("OURS", "--ttrace-dir" in sys.argv)
"""


def test_our_flags_without_enable(tmp_path: Path) -> None:
    """The parser of whatever Megatron the script puts on its path learns our flags on import."""
    core, training = (package(tmp_path / "tree", name) for name in ("core", "training"))
    Path(core).with_name("package_info.py").write_text("__version__ = '0.19.2'\n")
    Path(training).with_name("arguments.py").write_text(PARSER)
    (tmp_path / "train.py").write_text(TRAIN)
    words = (*scripts.command("train.py"), "--ttrace", "--help")
    done = programs.run(*words, cwd=tmp_path, PYTHONPATH="")
    assert "--ttrace-allow-other-megatron" in done.stdout, done.stderr
    assert "OURS" in done.stdout


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import megatron.bridge", True),
        ("def main():\n    from megatron.bridge.training.pretrain import pretrain", True),
        ("import megatron.core, megatron.bridge.recipes as recipes", True),
        ("import megatron.bridges", False),
        ("from megatron.training import pretrain", False),
        ("import (", False),
        ("\0", False),
    ],
)
def test_a_script_of_megatron_bridge(tmp_path, code, expected):
    """It is read, not run."""
    (tmp_path / "script.py").write_text(code)
    assert scripts.imports_bridge(tmp_path / "script.py") is expected


def test_flags_that_a_script_does_not_have(tmp_path):
    """Commands that change Megatron-LM's flags say what to do instead."""
    path = tmp_path / "recipe.py"
    path.write_text("import megatron.bridge")
    with pytest.raises(TTraceError, match=r"shrinking changes flags .* use ttrace check"):
        scripts.require_flags(path, "shrinking")
    path.write_text("import megatron.training")
    scripts.require_flags(path, "shrinking")
