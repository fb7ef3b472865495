# SPDX-License-Identifier: Apache-2.0
"""A training configuration of Megatron-LM as a command.

``MODEL_ARGS`` of its functional tests (``model_config.yaml``) become arguments as
``_run_training.sh`` makes them (``tests/functional_tests/shell_test_utils``): ``true`` is a flag
alone, ``[a b]`` several values, anything else one value. ``ARGS`` of its recipes
(``examples/moe_recipes``) are named as options are, and ``false`` is no flag.
"""

import math
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ttrace.jobs.commands.command_line import Command
from megatron_ttrace.jobs.shrink import axes
from megatron_ttrace.jobs.shrink.command_flags import CommandFlags
from megatron_ttrace.trace import small_files
from megatron_ttrace.trace.errors import TTraceError, reported

RANKS_PER_NODE = 8
"""Ranks that the functional tests start on a machine. A layout may need several machines."""

_SCRIPTS = {
    "bert": ("examples/bert/pretrain_bert.py", "pretrain_bert.py"),
    "hybrid": ("pretrain_hybrid.py", "pretrain_mamba.py"),
    "mamba": ("pretrain_mamba.py", "pretrain_hybrid.py"),
    "t5": ("examples/t5/pretrain_t5.py", "pretrain_t5.py"),
    "mimo": ("examples/mimo/train.py",),
    "multimodal-llava": ("pretrain_vlm.py",),
}
"""Scripts of the families that are not trained by ``pretrain_gpt.py``."""


class NoTrainingError(TTraceError):
    """A file that configures something else than a training run of Megatron's."""


def read(path: Path) -> Command:
    """The training command of a file.

    Raises:
        NoTrainingError: when it configures inference, reinforcement learning, or another program.
        TTraceError: when it cannot be read, or the checkout lacks its script.
    """
    with reported(f"{path} cannot be read", OSError, ValueError):
        content = small_files.yaml(path)
    if not isinstance(content, Mapping) or content.keys().isdisjoint(("MODEL_ARGS", "ARGS")):
        raise TTraceError(
            f"{path} has neither MODEL_ARGS nor ARGS: give a configuration of Megatron-LM"
        )
    mode = str(content.get("MODE") or "pretraining")
    if mode != "pretraining":
        raise NoTrainingError(f"{path} is for {mode}, not for training")
    values = content["MODEL_ARGS"] if "MODEL_ARGS" in content else _flags(content["ARGS"])
    if not isinstance(values, Mapping) or not all(str(key).startswith("--") for key in values):
        raise NoTrainingError(f"{path} has no arguments of a training script of Megatron's")
    variables = content.get("ENV_VARS")
    environment = {
        str(name): str(value)
        for name, value in (variables.items() if isinstance(variables, Mapping) else ())
    }
    words = [word for name, value in values.items() for word in _words(str(name), value)]
    # The functional tests start as many ranks as the layout needs: one is too few, so that many.
    ranks = math.lcm(axes.of_large(CommandFlags.parse(words), 1).ranks, RANKS_PER_NODE)
    nodes = ranks // RANKS_PER_NODE
    script, root = _script(path, values)
    if script.parent != root:
        # Scripts in folders import those beside them, and Megatron, from the checkout.
        inherited = environment.get("PYTHONPATH") or os.environ.get("PYTHONPATH")
        entries = filter(None, [str(root.absolute()), inherited])
        environment["PYTHONPATH"] = os.pathsep.join(entries)
    return Command(str(script), tuple(words), environment, ranks, nodes)


def _flags(values: Any) -> Any:
    """``ARGS`` as ``MODEL_ARGS``."""
    if not isinstance(values, Mapping):
        return values
    given = {str(name): value for name, value in values.items() if str(value).lower() != "false"}
    return {
        f"--{name.replace('_', '-')}" if name.isidentifier() else name: value
        for name, value in given.items()
    }


def _words(flag: str, value: Any) -> list[str]:
    if isinstance(value, list):
        return [flag, *" ".join(map(str, value)).split()]
    text = str(value).strip()
    if text.lower() == "true":
        return [flag]
    if text.startswith("[") and text.endswith("]"):
        return [flag, *text[1:-1].split()]
    for _ in range(2):
        # Quotes protect a value from xargs, then from eval (run_training.sh of the tests).
        try:
            plain = shlex.split(text)
        except ValueError:
            break
        if len(plain) == 1:
            text = plain[0]
    return [flag, text] if text else [flag]


def _script(path: Path, values: Mapping[str, Any]) -> tuple[Path, Path]:
    """The training script, and the checkout that the file lies in, or else this directory."""
    parts = path.absolute().parts
    family = parts[parts.index("test_cases") + 1] if "test_cases" in parts[:-1] else ""
    if "--hybrid-layer-pattern" in values or "--hybrid-override-pattern" in values:
        family = "hybrid"
    names = _SCRIPTS.get(family, ("pretrain_gpt.py",))
    roots = [folder for folder in path.absolute().parents if (folder / "megatron").is_dir()]
    for root in roots or [Path()]:
        for name in names:
            if (root / name).is_file():
                return root / name, root
    where = roots[0] if roots else Path.cwd()
    raise TTraceError(f"{path} needs {' or '.join(names)}, which {where} lacks")
