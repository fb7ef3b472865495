# SPDX-License-Identifier: Apache-2.0
"""Mistakes that are planted in Megatron: each puts one function in the place of one of its own.

``parallel.py``, ``features.py`` and ``counting.py`` are lists of them; ``train.py`` trains.
"""

import dataclasses
import functools
import importlib
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

PLANTED = "TTRACE_TEST_PLANTED"
"""Environment variable: which mistake to make."""
LISTS = ("parallel", "features", "counting")


@dataclasses.dataclass(frozen=True, slots=True)
class Mistake:
    """A mistake of the job under test.

    Attributes:
        id: its name.
        plant: makes it in this process.
        job: that shows it: a configuration of the matrix, or a model and words of
            ``configurations.FLAGS``; empty if its test has its own job.
        ranks: of such a job.
        place: beginning of the first culprit's name.
        everywhere: whether the reference makes it as well.
    """

    id: str
    plant: Callable[[], None]
    job: str
    ranks: int
    place: str
    everywhere: bool

    def arguments(self, directory: Path) -> tuple[int, tuple[str, ...]]:
        """Number of ranks and Megatron's arguments of the job."""
        from megatron_ttrace.evaluation.matrix import configurations as matrix

        if "/" in self.job:
            (job,) = matrix.select(matrix.configurations(), [self.job])
            return job.nproc, job.case(directory).arguments
        model, _, words = self.job.partition(" ")
        return self.ranks, (*matrix.arguments_of(model, words), "--mock-data")


def global_rank() -> int:
    """Of this process, which may be a fork of one that had none."""
    return int(os.environ.get("RANK", "0"))


MISTAKES: dict[str, Mistake] = {}


def mistake(
    target: str = "", *jobs: str, ranks: int = 2, place: str = "", everywhere: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function that replaces ``target``, or without one, calls :func:`wrap` itself.

    With several jobs it is as many mistakes, whose names are numbered from the second.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        plant = functools.partial(wrap, target, function) if target else function
        for number, job in enumerate(jobs or [""], start=1):
            name = function.__name__ if number == 1 else f"{function.__name__}_{number}"
            MISTAKES[name] = Mistake(name, plant, job, ranks, place, everywhere)
        return function

    return register


def wrap(target: str, new: Callable[..., Any]) -> None:
    """Replace ``module:path``, the module below ``megatron.core``, by ``new(original, ...)``."""
    module, _, path = target.partition(":")
    if not module.startswith(("megatron.", "torch.")):
        module = f"megatron.core.{module}"
    owner = importlib.import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    raw = inspect.getattr_static(owner, name)
    old = raw.fget if isinstance(raw, property) else getattr(owner, name)

    @functools.wraps(old)
    def wrapped(*args: Any, **more: Any) -> Any:
        return new(old, *args, **more)

    # The checker must not see what was planted: code without a file is not taken for the user's.
    wrapped.__code__ = wrapped.__code__.replace(co_filename="<planted>")
    if isinstance(raw, property):
        setattr(owner, name, property(wrapped))
    else:
        setattr(owner, name, staticmethod(wrapped) if isinstance(raw, staticmethod) else wrapped)


def load() -> dict[str, Mistake]:
    """All mistakes by name."""
    for name in LISTS:
        importlib.import_module(f"tests.assay.planted.{name}")
    return MISTAKES


def plant(name: str) -> None:
    """Make a mistake, if this process belongs to a run that does; all make a fault (JSON)."""
    if name.startswith("{"):
        importlib.import_module("tests.assay.planted.checkpoints").plant(name)
        return
    mistake = load()[name]
    if mistake.everywhere or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        mistake.plant()
