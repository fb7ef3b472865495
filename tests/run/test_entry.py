# SPDX-License-Identifier: Apache-2.0
"""How our errors end a rank before its run starts."""

import importlib
import re
import sys
import types
from pathlib import Path

import pytest

from megatron_ttrace import cpu
from megatron_ttrace.jobs.settings import Settings
from megatron_ttrace.run import entry
from megatron_ttrace.run.entry import exits_on_user_error
from megatron_ttrace.trace.errors import DEBUG, TTraceError


@pytest.mark.parametrize(
    ("error", "unexpected", "code", "line"),
    [
        (TTraceError("no"), False, 2, "ttrace: no\n"),
        (TTraceError("no"), True, 2, "ttrace: no\n"),
        (KeyError("a\nb"), True, 2, "ttrace: could not start: KeyError: .*\n"),
        (SystemExit(7), True, 7, ""),
    ],
)
def test_how_an_error_ends_a_run(
    error: BaseException,
    unexpected: bool,
    code: int,
    line: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One line and exit code 2: Python's own 1 would mean that the run diverged.

    The exit of Megatron's parser is not changed.
    """
    monkeypatch.delenv(DEBUG, raising=False)
    with pytest.raises(SystemExit) as ended, exits_on_user_error(unexpected=unexpected):
        raise error
    assert ended.value.code == code
    assert re.fullmatch(line, capsys.readouterr().err)


def test_an_unexpected_error_of_another_run() -> None:
    """A run that is not checked ends as without this package."""
    with pytest.raises(KeyError), exits_on_user_error():
        raise KeyError


@pytest.mark.parametrize("settings", [Settings(role="plan"), Settings(small=Path("flags.txt"))])
def test_only_configurations_are_shrunk(settings: Settings) -> None:
    """A loop that has flags, or none, would train at its full size."""
    with pytest.raises(TTraceError, match="only configurations"):
        entry.require_unshrunk(settings)
    entry.require_unshrunk(Settings())


def test_a_loop_without_megatrons_arguments_compiles_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a GPU: ``make`` fails in a wheel, and where there is no compiler."""
    utils = importlib.import_module("megatron.core.datasets.utils")
    monkeypatch.setattr(utils, "compile_helpers", lambda: pytest.fail("compiled"))
    monkeypatch.setattr(cpu, "needed", lambda device: True)
    monkeypatch.setattr(cpu, "activate", lambda: None)
    entry.activate()
    utils.compile_helpers()


def parser(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module in the place of Megatron's parser's, which must not be called."""
    chain = ["megatron", "megatron.training", "megatron.training.arguments"]
    modules = [types.ModuleType(name) for name in chain]
    for name, module, inner in zip(chain, modules, [*modules[1:], None], strict=True):
        monkeypatch.setitem(sys.modules, name, module)
        if inner is not None:
            setattr(module, inner.__name__.rpartition(".")[2], inner)
    arguments = modules[-1]
    arguments.parse_args = lambda *_: pytest.fail("it was parsed")  # type: ignore[attr-defined]
    return arguments


def test_a_file_instead_of_arguments(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before Megatron's parser reads it, and loses our flags."""
    arguments = parser(monkeypatch)
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "--yaml-cfg", "file.yaml", "--ttrace"])
    entry._wrap_parse_args()
    with pytest.raises(SystemExit) as ended:
        arguments.parse_args()
    assert ended.value.code == 2
    assert "yaml_cfg = file.yaml: Megatron ignores" in capsys.readouterr().err


class Lazy(types.ModuleType):
    """A module that imports what is asked for, which may not be installed."""

    def __getattr__(self, name: str) -> object:
        pytest.fail(f"it was asked for {name}")


def test_lazy_modules_stay_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no name of the parser's unless it is in them already.

    Nor has ``None``, by which a script keeps a package from being imported.
    """
    arguments = parser(monkeypatch)
    monkeypatch.setitem(sys.modules, "lazy", Lazy("lazy"))
    monkeypatch.setitem(sys.modules, "blocked", None)
    entry._wrap_parse_args()
    assert hasattr(arguments.parse_args, "__wrapped__")
