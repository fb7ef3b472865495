# SPDX-License-Identifier: Apache-2.0
"""Under which names the modules are offered, and when they are not."""

import json
import os
import subprocess
import sys
from pathlib import Path

from megatron_ttrace.cpu.te.releases import PINNED
from megatron_ttrace.mcore.versions import KNOWN, megatron_core_version, series

ROOT = Path(__file__).parents[3]
FORKS = """
import json, os, sys
from megatron_ttrace.cpu import te

for folder, code in json.loads(sys.argv[1]):
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
    else:
        sys.path.insert(0, folder)
        exec(code)
        sys.stdout.flush()
        os._exit(0)
"""
ASKED = """
assert not te.emulated() and "transformer_engine" not in sys.modules
te.install(); te.install()
import transformer_engine as engine
from transformer_engine.pytorch import Linear, DotProductAttention
from transformer_engine.common.recipe import DelayedScaling
assert te.emulated() and not te.real_present()
try:
    engine.pytorch.LayerNormMLP
except AttributeError as error:
    assert str(error) == "transformer_engine.pytorch.LayerNormMLP is not emulated on a CPU"
try:
    import transformer_engine.pytorch.no_such_part
except ModuleNotFoundError:
    print(engine.__version__, Linear.__module__, DelayedScaling.__module__)
"""
FOUND = "te.install(); import transformer_engine as e; print(e.__version__, te.emulated())"


def test_what_is_offered(tmp_path):
    """Only when it is asked for; in place of a half-installed engine, and not of a real one."""
    for name, text in (("half", "raise OSError('libcuda.so.1: cannot open')"), ("real", "")):
        package = tmp_path / name / "transformer_engine"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("__version__ = '1.0'")
        (package / "pytorch.py").write_text(text)
    programs = [(str(tmp_path / name), FOUND) for name in ("half", "real")]
    # A release of Megatron that is to be tested comes last.
    path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    ran = subprocess.run(
        [sys.executable, "-c", FORKS, json.dumps([("", ASKED), *programs])],
        env={"PYTHONPATH": path, "PATH": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr
    pinned = PINNED[series(megatron_core_version())]
    assert ran.stdout.splitlines() == [
        f"{pinned} megatron_ttrace.cpu.te.linear transformer_engine.common.recipe",
        f"{pinned} True",
        "1.0 False",
    ]


def test_every_supported_megatron_has_its_release():
    """The releases that are emulated are those that a supported Megatron is built with."""
    assert {*PINNED} == {series(version) for version in KNOWN}
