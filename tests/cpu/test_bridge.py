# SPDX-License-Identifier: Apache-2.0
"""Megatron-Bridge on a CPU. What runs it is skipped where it is absent: `make bridge` runs it."""

import dataclasses
import math
import re
import types
from pathlib import Path
from typing import Any

import pytest

from megatron_ttrace.cpu import bridge
from megatron_ttrace.cpu.bridge import Flat
from tests.bridge import data
from tests.integration.jobs import ROOT, torchrun

SCRIPTS = ROOT / "tests" / "bridge"
needs_bridge = pytest.mark.skipif(not bridge.installed(), reason="make bridge installs it")


@dataclasses.dataclass
class Model:
    num_moe_experts: int | None = 8
    bf16: bool = True
    transformer: Any = None


@dataclasses.dataclass
class Optimizer:
    bf16: bool = True


def test_a_configuration_as_one_namespace() -> None:
    """All that have a name are set, also inside a model; a name that none has is not made up."""
    inner = types.SimpleNamespace(apply_rope_fusion=True)
    config = types.SimpleNamespace(model=Model(transformer=inner), optimizer=Optimizer(), ft=None)
    flat: Any = Flat(config)
    assert flat.num_experts == flat.num_moe_experts == 8
    flat.bf16 = flat.apply_rope_fusion = False
    assert not config.model.bf16
    assert not config.optimizer.bf16
    assert not inner.apply_rope_fusion
    flat.log_energy = True
    assert not hasattr(flat, "log_energy")


@needs_bridge
@pytest.mark.parametrize("name", ["llama", "experts", "recipe", "sft"])
def test_an_unmodified_script_trains(name: str, tmp_path: Path) -> None:
    """Two iterations over gloo, in forks of one process."""
    data.write(tmp_path / "data")
    done = torchrun(2, SCRIPTS / f"{name}.py", tmp_path / "data", cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "on the CPU over gloo" in done.stdout
    # The last rank prints them.
    losses = [float(loss) for loss in re.findall(r"lm loss: (\S+)", done.stdout)]
    assert len(losses) == 2
    assert all(0 < loss < math.log(128) + 1 for loss in losses)


@needs_bridge
def test_torchrun(tmp_path: Path) -> None:
    """In fresh interpreters."""
    words = (SCRIPTS / "train.py", SCRIPTS / "llama.py")
    done = torchrun(2, *words, cwd=tmp_path, cold=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(re.findall("lm loss", done.stdout)) == 2
