# SPDX-License-Identifier: Apache-2.0
"""Settings of all tests."""

import functools
import gc
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings

from megatron_ttrace.trace import errors

STARTERS = (
    "subprocess",
    "megatron_ttrace.jobs.processes.ranks",
    "tests.programs",
    "tests.warm",
    "tests.documents",
    "tests.integration.jobs",
    "tests.jobs.processes.test_worktrees",
    "tests.report.chromium",
)
"""What starts programs; test modules that use it are left out of `make unit`."""

HAS = {name: importlib.util.find_spec(name) is not None for name in ("megatron.bridge", "verl")}

# No deadlines: on a shared machine that is slow for a moment an example would fail for no reason.
# Nightly tests draw more examples.
settings.register_profile("steady", deadline=None, print_blob=True, max_examples=50)
# On CI the same examples for the same code, so that a change is judged by what it changes.
settings.register_profile("ci", settings.get_profile("steady"), derandomize=True)
settings.register_profile(
    "nightly",
    settings.get_profile("steady"),
    max_examples=2000,
    suppress_health_check=[HealthCheck.too_slow],
)
# An error in a test of a repair, which a run survives, is an error here.
os.environ.setdefault("TTRACE_STRICT", "1")
# Seconds until W&B's service has started, of which a busy machine needs many.
os.environ.setdefault("WANDB__SERVICE_WAIT", "300")

settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))


# Nothing that is imported while tests are collected is garbage.
gc.disable()


def pytest_collection_finish() -> None:
    """From here on there is garbage; what is imported is not looked through for it."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Libraries count at the end what was not freed."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """A command that a test calls in its own process sets variables, and withholds values."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    errors._withheld.clear()


@pytest.fixture(scope="session", autouse=True)
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """References that all tests share, of all workers; ``integration/jobs.py`` reads where."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "references"
    shared.mkdir(exist_ok=True)
    os.environ["TTRACE_TEST_REFERENCES"] = str(shared)
    return shared


@pytest.fixture
def work(tmp_path: Path, references: Path) -> Path:
    """A directory for a command that runs many checks."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "references").symlink_to(references)
    return folder


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of modules that start programs; leave out nightly ones unless asked for.

    One of these starts hundreds of processes. They are asked for by ``HYPOTHESIS_PROFILE=nightly``,
    by any ``-m``, or by their names.
    """
    for item in items:
        module = getattr(item, "module", None)
        if isinstance(module, ModuleType) and _starts_programs(module):
            item.add_marker("slow")
        for name, is_installed in HAS.items():
            marker = name.rpartition(".")[-1]
            if item.get_closest_marker(marker) and not is_installed:
                item.add_marker(pytest.mark.skip(reason=f"`make {marker}` installs {name}"))
    wanted = os.environ.get("HYPOTHESIS_PROFILE") == "nightly" or config.option.markexpr
    if not wanted and not any("::" in word for word in config.args):
        nightly = [item for item in items if item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=nightly)
        items[:] = [item for item in items if item not in nightly]


@functools.cache
def _starts_programs(module: ModuleType) -> bool:
    named = {value.__name__ for value in vars(module).values() if isinstance(value, ModuleType)}
    homes = {
        getattr(value, "__module__", None) for value in vars(module).values() if callable(value)
    }
    return not named.union(homes).isdisjoint(STARTERS)
