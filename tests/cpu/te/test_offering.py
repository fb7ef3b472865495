# SPDX-License-Identifier: Apache-2.0
"""Under which names the modules are offered, and when they are not."""

import os
import subprocess
import sys
from pathlib import Path

from megatron_ttrace.cpu.te.releases import PINNED, current
from megatron_ttrace.mcore.versions import KNOWN, megatron_core_version, series

ROOT = Path(__file__).parents[3]


def python(code, *paths, **more):
    # A release of Megatron that is to be tested comes last.
    path = [*map(str, (ROOT, *paths)), os.environ.get("PYTHONPATH", "")]
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(path), "PATH": "", **more},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split()


def default():
    return PINNED[series(megatron_core_version())]


def test_only_when_asked():
    """And a half-installed TransformerEngine is no obstacle."""
    code = """
import sys
from megatron_ttrace.cpu import te
assert not te.emulated() and "transformer_engine" not in sys.modules
te.install(); te.install()
import transformer_engine as engine
from transformer_engine.pytorch import Linear, DotProductAttention
from transformer_engine.common.recipe import DelayedScaling
assert te.emulated() and not te.real_present()
try:
    import transformer_engine.pytorch.no_such_part
except ModuleNotFoundError:
    print(engine.__version__, Linear.__module__, DelayedScaling.__module__)
"""
    expected = [default(), "megatron_ttrace.cpu.te.linear", "transformer_engine.common.recipe"]
    assert python(code) == expected


def test_half_installed_engine_is_replaced(tmp_path):
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '1.0'")
    (package / "pytorch.py").write_text("raise OSError('libcuda.so.1: cannot open')")
    code = "from megatron_ttrace.cpu import te; te.install(); import transformer_engine as e\n"
    assert python(code + "print(e.__version__, te.emulated())", tmp_path) == [default(), "True"]


def test_real_engine_is_left_alone(tmp_path):
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '1.0'")
    (package / "pytorch.py").write_text("")
    code = "from megatron_ttrace.cpu import te; te.install(); import transformer_engine as e\n"
    assert python(code + "print(e.__version__, te.emulated())", tmp_path) == ["1.0", "False"]


def test_every_supported_megatron_has_its_release():
    """The releases that are emulated are those that a supported Megatron is built with."""
    assert {*PINNED} == {series(version) for version in KNOWN}


def test_the_installed_megatron_chooses():
    """The emulation calls itself what the Megatron was built with."""
    assert current() == PINNED[series(megatron_core_version())]
