# SPDX-License-Identifier: Apache-2.0
"""The recipes of the installed Megatron-Bridge, and the small jobs that they become.

Recipes are functions in ``megatron.bridge.recipes`` that return a ``ConfigContainer``. Their source
is read; they are called in children of another process, ``driver.py``.
"""

import ast
import dataclasses
import fnmatch
import importlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megatron_ttrace.evaluation.recipes.bridge import driver
from megatron_ttrace.evaluation.recipes.bridge.driver import Planned
from megatron_ttrace.evaluation.recipes.collect import Answer, Recipe, SmallJob
from megatron_ttrace.jobs.shrink import bridge as sizes
from megatron_ttrace.jobs.shrink import documents
from megatron_ttrace.mcore.versions import quiet_imports
from megatron_ttrace.trace import codec
from megatron_ttrace.trace.errors import TTraceError

SCRIPT = Path(driver.__file__)
_RESULT = "ConfigContainer"


def folder() -> Path:
    """That of the installed recipes; Bridge is not imported.

    Raises ``TTraceError`` when there is none.
    """
    spec = importlib.util.find_spec("megatron")
    for place in (spec and spec.submodule_search_locations) or ():
        recipes = Path(place, "bridge", "recipes")
        if recipes.is_dir():
            return recipes
    raise TTraceError("megatron-bridge is not installed: see docs/bridge.md")


def functions(place: Path) -> list[str]:
    """The recipes in a folder, as ``MODULE:FUNCTION``."""
    return [
        f"{'.'.join(file.relative_to(place).with_suffix('').parts)}:{name}"
        for file in sorted(place.rglob("*.py"))
        for name in _of_file(file)
    ]


def _of_file(file: Path) -> Iterator[str]:
    for node in ast.parse(file.read_bytes()).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            result = node.returns
            name = result.value if isinstance(result, ast.Constant) else getattr(result, "id", "")
            if name == _RESULT:
                yield node.name


def title(function: str) -> str:
    """What a recipe is called: ``llama/llama2_7b_pretrain_2gpu_h100_bf16``."""
    module, _, name = function.partition(":")
    return f"{module.partition('.')[0]}/{name.removesuffix('_config')}"


def collect(patterns: Sequence[str], most: int) -> list[Recipe]:
    """Find the recipes whose titles match, and shrink them to at most so many ranks."""
    wanted = [
        function
        for function in functions(folder())
        if not patterns or any(fnmatch.fnmatchcase(title(function), p) for p in patterns)
    ]
    planned = _planned(wanted, most)
    jobs: dict[str, SmallJob] = {}
    return [_recipe(function, planned.get(function), jobs) for function in wanted]


def _planned(wanted: Sequence[str], most: int) -> dict[str, Planned]:
    with tempfile.TemporaryDirectory(prefix="ttrace-") as place:
        file = Path(place, "planned.jsonl")
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(SCRIPT), "--plan", str(file), str(most)],
            input="\n".join(wanted),
            env={**os.environ, **driver.OFFLINE},
            cwd=place,
            capture_output=True,
            text=True,
            check=False,
        )
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        if wanted and not lines:
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise TTraceError(f"the recipes of megatron-bridge cannot be imported: {last}")
    recipes = [codec.decode(Planned, codec.parse(line)) for line in lines]
    return {planned.recipe.name: planned for planned in recipes}


def _recipe(function: str, planned: Planned | None, jobs: dict[str, SmallJob]) -> Recipe:
    """As a checkout's; equal configurations get the same job."""
    if planned is None:
        why = "building it crashed or took too long"
        return Recipe(title(function), answer=Answer.COULD_NOT_CHECK, why=why)
    small = tuple(map(jobs.setdefault, planned.digests, planned.recipe.jobs))
    return dataclasses.replace(planned.recipe, name=title(function), jobs=small)


def data(place: Path) -> Callable[[SmallJob], Sequence[str]]:
    """Texts to fine-tune on and a tokenizer, for ``recipes.run.Checker``.

    Bridge is imported here, once for all ranks, which are forks of this process.
    """
    words = (sizes.DATA, str(documents.write_tuning(place / "text")))
    os.environ.update(driver.OFFLINE)
    with quiet_imports():
        importlib.import_module(driver.PACKAGE)
    return lambda job: words
