# SPDX-License-Identifier: Apache-2.0
"""Under which names the modules are offered, and when they are not."""

import os
import subprocess
import sys
from pathlib import Path

from megatron_ttrace.cpu.te.releases import PINNED, VARIABLE
from megatron_ttrace.mcore.versions import megatron_core_version

ROOT = Path(__file__).parents[3]


def python(code, *paths, **more):
    # A release of Megatron that is to be tested comes last.
    path = [*map(str, (ROOT, *paths)), os.environ.get("PYTHONPATH", "")]
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(path), "PATH": "", **more},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split()


def default():
    return str(PINNED[megatron_core_version().rpartition(".")[0]])


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


def test_older_release_on_request():
    """It has fewer names and arguments; another one later in the same process is refused."""
    code = """
import inspect, os
from megatron_ttrace.cpu import te
from megatron_ttrace.errors import TTraceError
te.install(); te.install()
import transformer_engine as engine
from transformer_engine.pytorch import DotProductAttention, GroupedLinear
from transformer_engine.pytorch.module import GroupedLinear as Same
assert GroupedLinear is Same
assert "softmax_type" not in inspect.signature(DotProductAttention).parameters
assert hasattr(GroupedLinear(1, 2, 2).weight0, "tensor_model_parallel")
try:
    import transformer_engine.pytorch.router
except ModuleNotFoundError:
    print(engine.__version__)
os.environ["TTRACE_TE_VERSION"] = "2.6"
try:
    te.install()
except TTraceError as error:
    print(str(error).split(":")[0])
"""
    said = python(code, **{VARIABLE: "2.5"})
    assert " ".join(said) == "2.5.0 TransformerEngine 2.5.0 is emulated already"
