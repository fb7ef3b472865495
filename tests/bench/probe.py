# SPDX-License-Identifier: Apache-2.0
"""msprobe (mindstudio-probe), installed for the benchmarks only, in an own environment."""

import json
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.bench.jobs import ROOT, BenchError

HOME = ROOT / ".venv-msprobe"
_PACKAGE = "mindstudio-probe==26.2.0"


def python() -> Path:
    """The interpreter that has it, and this environment's packages. Installs it if need be.

    Raises:
        BenchError: when it cannot be installed, or not be imported with this torch.
    """
    program = HOME / "bin" / "python"
    if not program.exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(HOME)], check=True)
    if not list(HOME.glob("lib/python*/site-packages/msprobe")):
        pip = [sys.executable, "-m", "pip", "--python", str(program), "install", "-q", _PACKAGE]
        done = subprocess.run(pip, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BenchError(f"{_PACKAGE} cannot be installed: {_last(done.stderr)}")
    # Its own packages come first; torch and Megatron are this environment's.
    [packages] = HOME.glob("lib/python*/site-packages")
    (packages / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n")
    done = subprocess.run(
        [program, "-c", "import msprobe.pytorch"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise BenchError(f"{_PACKAGE} does not work with this torch: {_last(done.stderr)}")
    return program


class Probe:
    """Dumps the steps of this process: all modules' inputs, outputs and gradients."""

    def __init__(self, task: str, home: Path) -> None:
        """``task`` is ``statistics`` or ``tensor``; ``home`` a directory for the dumps."""
        from msprobe.pytorch import PrecisionDebugger

        config = home / "msprobe.json"
        settings: dict[str, Any] = {"task": task, "dump_path": str(home / "dump"), "level": "L0"}
        settings |= {"rank": [], "step": [], task: {"scope": [], "list": [], "data_mode": ["all"]}}
        config.write_text(json.dumps(settings))
        self._debugger = PrecisionDebugger(config_path=str(config))

    @contextmanager
    def dumping(self, model: Any) -> Iterator[None]:
        """Dump what runs in this context."""
        self._debugger.start(model=model)
        yield
        self._debugger.stop()
        self._debugger.step()


def _last(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[-1][:300]
