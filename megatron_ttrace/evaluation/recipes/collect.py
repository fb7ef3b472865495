# SPDX-License-Identifier: Apache-2.0
"""The training configurations of a checkout, and the different small jobs that they become."""

import dataclasses
import enum
import fnmatch
import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Self
from unittest import mock

from megatron_ttrace.jobs.commands import recipe_file, shell_script
from megatron_ttrace.jobs.commands.command_line import Command, ShellScript
from megatron_ttrace.jobs.processes import stripped
from megatron_ttrace.jobs.shrink import plan
from megatron_ttrace.trace import codec, small_files
from megatron_ttrace.trace.errors import TTraceError

_TESTS = "tests/functional_tests/test_cases"
_SCRIPT = "pretrain_gpt.py"
_ARGUMENTS = ("MODEL_ARGS", "\nARGS:")
"""What a configuration has: one of these sections (:mod:`recipe_file`)."""
_VARIABLES = ("CUDA", "CUBLAS", "NCCL", "NVTE", "PYTHONPATH", "PYTORCH", "TORCH")
"""Prefixes of variables that the training sees; a test's own (``N_REPEATS``) make no other job."""


class Answer(enum.StrEnum):
    """What came out of a job."""

    EQUIVALENT = "equivalent"
    DIVERGED = "diverged"
    REFUSED = "refused by Megatron"
    FAILS = "fails without ttrace too"
    HUB = "needs a model hub"
    COULD_NOT_CHECK = "cannot be checked"


@dataclasses.dataclass(frozen=True, slots=True)
class SmallJob:
    """A small job.

    Attributes:
        arguments: without those of the data.
        environment: variables of the configuration that the training sees.
        place: of the script below the checkout, where another one may have the same name.
    """

    script: str
    arguments: tuple[str, ...]
    ranks: int
    environment: tuple[tuple[str, str], ...]
    place: str = ""

    @classmethod
    def of(cls, command: Command, job: plan.Job, checkout: Path | None = None) -> Self:
        """A job that a command was shrunk to."""
        environment = tuple(sorted(command.environment.items()))
        place = os.path.relpath(command.script, checkout) if checkout else ""
        return cls(command.script, job.arguments, job.axes.ranks, environment, place)

    @property
    def key(self) -> str:
        """The same for jobs that are the same, wherever the checkout is."""
        script = self.place or Path(self.script).name
        job = [script, list(self.arguments), self.ranks, list(self.environment)]
        return hashlib.sha256(json.dumps(job).encode()).hexdigest()[:12]

    def moved(self, root: Path, to: Path) -> Self:
        """The same job in another checkout."""
        return dataclasses.replace(
            self,
            script=self.script.replace(str(root), str(to)),
            arguments=tuple(word.replace(str(root), str(to)) for word in self.arguments),
            environment=tuple(
                (name, value.replace(str(root), str(to))) for name, value in self.environment
            ),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """A configuration.

    Attributes:
        name: its folder or script, below the checkout.
        answer: of one for training that cannot be made small.
        lost: what the small jobs do not do.
        file: its path below the checkout.
    """

    name: str
    jobs: tuple[SmallJob, ...] = ()
    answer: Answer | None = None
    why: str = ""
    lost: tuple[str, ...] = ()
    file: str = ""

    @property
    def is_trained(self) -> bool:
        """Whether its jobs decide the answer."""
        return bool(self.jobs) and self.answer is None


def collect(
    checkout: Path,
    patterns: Sequence[str] = (),
    most: int = 8,
    places: Sequence[Path] = (),
    *,
    anywhere: bool = False,
) -> list[Recipe]:
    """Find and shrink the configurations of a checkout whose names match ``patterns``, if any.

    With ``anywhere`` it may be any folder of scripts and configurations. ``places`` are files and
    folders in it to look in, instead of those of Megatron-LM; ``most``: ranks of a small job.

    Raises:
        TTraceError: when there are none.
    """
    paths = {} if places else _own(checkout)
    if not paths and (places or anywhere):
        found = {path for place in places or (checkout,) for path in _training(place)}
        paths = {path.relative_to(checkout).as_posix(): path for path in sorted(found)}
    if not paths and not places:
        raise TTraceError(
            f"{checkout} has neither {_TESTS} nor examples: give a checkout of Megatron-LM"
            + (" or a folder of scripts" if anywhere else "")
        )
    return [
        _recipe(name, path, checkout, most)
        for name, path in paths.items()
        if not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    ]


def _own(checkout: Path) -> dict[str, Path]:
    """The configurations that Megatron-LM has, by their names."""
    tests = sorted((checkout / _TESTS).rglob("model_config.yaml"))
    marks = {".sh": (_SCRIPT,), ".yaml": _ARGUMENTS}
    examples = sorted((checkout / "examples").rglob("*.*"))
    return {
        **{path.parent.relative_to(checkout / _TESTS).as_posix(): path for path in tests},
        **{
            path.relative_to(checkout).as_posix(): path
            for path in examples
            if _mentions(path, *marks.get(path.suffix, ()))
        },
    }


def _training(place: Path) -> list[Path]:
    """A file, or the configurations and scripts of a folder that train."""
    if place.is_file():
        return [place]
    marks = {".yaml": _ARGUMENTS, ".yml": _ARGUMENTS, ".sh": ("pretrain_",)}
    return [
        path
        for path in place.rglob("*")
        if path.is_file() and _mentions(path, *marks.get(path.suffix, ()))
    ]


def _mentions(path: Path, *marks: str) -> bool:
    try:
        text = b"\n" + codec.read(path, small_files.LIMIT) if marks else b""
        return any(mark.encode() in text for mark in marks)
    except (OSError, codec.CodecError):
        return False


def _recipe(name: str, path: Path, checkout: Path, most: int) -> Recipe:
    file = path.relative_to(checkout).as_posix()
    try:
        command = recipe_file.read(path) if path.suffix != ".sh" else _example(path, checkout)
        small = plan.shrink(command, most)
    except TTraceError as error:
        other = isinstance(error, recipe_file.NoTrainingError)
        answer = None if other else Answer.COULD_NOT_CHECK
        why = " ".join(str(error).replace(str(path), "it").split())
        return Recipe(name, answer=answer, why=why, file=file)
    seen = {
        name: value for name, value in command.environment.items() if name.startswith(_VARIABLES)
    }
    command = dataclasses.replace(command, environment=seen)
    jobs = tuple(SmallJob.of(command, job, checkout) for job in small.jobs)
    return Recipe(name, jobs, lost=small.lost, file=file)


def _example(path: Path, checkout: Path) -> Command:
    """The command of an example's shell script, run as from the root of the checkout.

    It may make folders where it runs: a folder of links stands for the checkout. The script may be
    a stranger's: it sees no variables that may be secret.
    """
    with tempfile.TemporaryDirectory(prefix="ttrace-") as folder:
        for entry in checkout.resolve().iterdir():
            Path(folder, entry.name).symlink_to(entry)
        paths = [str(Path(folder, "unused", str(number))) for number in range(6)]
        with mock.patch.dict(os.environ, stripped.of(os.environ, Path(folder)), clear=True):
            command = shell_script.resolve(ShellScript((str(path.resolve()), *paths)), Path(folder))
        # The same script is the same job, whatever the folder was called.
        command = dataclasses.replace(
            command,
            script=command.script.replace(folder, str(checkout)),
            arguments=tuple(word.replace(folder, str(checkout)) for word in command.arguments),
            environment={
                name: value.replace(folder, str(checkout))
                for name, value in command.environment.items()
            },
        )
    script = checkout / command.script
    if not script.is_file() and (checkout / script.name).is_file():
        # Some scripts want the checkout's place written into them.
        script = checkout / script.name
    if not script.is_file():
        raise TTraceError(f"it trains {script}, which the checkout lacks")
    return dataclasses.replace(command, script=str(script))
