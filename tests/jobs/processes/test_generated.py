# SPDX-License-Identifier: Apache-2.0
"""Methods of dataclasses whose code is kept from run to run."""

import dataclasses
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from megatron_ttrace.jobs.processes import generated
from megatron_ttrace.jobs.processes.generated import Methods


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    return tmp_path / "cache" / "some.methods"


def defined(methods: Methods, default: int = 1) -> type[Any]:
    with methods.kept():

        @dataclasses.dataclass(frozen=True, order=True)
        class Point:
            x: int
            y: int = default

    assert "exec" not in vars(dataclasses)
    return Point


def compiled(monkeypatch: pytest.MonkeyPatch, methods: Methods) -> list[str]:
    """The texts that defining a class compiled."""
    texts = []

    def execute(text: str, *where: Any) -> None:
        texts.append(text)
        exec(text, *where)

    with monkeypatch.context() as context:
        context.setattr(generated, "builtins", types.SimpleNamespace(exec=execute))
        defined(methods)
    return texts


def test_methods_are_compiled_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiled(monkeypatch, Methods(file))
    assert not compiled(monkeypatch, Methods(file))


def test_methods_from_the_file_are_those_of_the_class(file: Path) -> None:
    defined(Methods(file))
    point, other = defined(Methods(file), 2), defined(Methods(file), 3)
    assert point(1) == point(1, 2)
    assert other(1) == other(1, 3)
    assert point(1) != other(1, 2)
    assert point(1) < point(1, 3)
    assert hash(point(1)) == hash(point(1, 2))
    assert repr(point(1)).endswith("Point(x=1, y=2)")
    with pytest.raises(dataclasses.FrozenInstanceError):
        point(1).x = 2
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        point()


@pytest.mark.parametrize("content", [b"", b"not bytecode", b"\x00" * 64])
def test_a_damaged_file_is_made_again(file: Path, content: bytes) -> None:
    file.parent.mkdir()
    file.write_bytes(content)
    assert defined(Methods(file))(1).y == 1
    assert file.read_bytes() != content


def test_a_few_new_methods_are_not_worth_writing(file: Path) -> None:
    with (many := Methods(file)).kept():
        for number in range(20):
            dataclasses.make_dataclass(f"Kind{number}", [f"field{number}"])
    before = file.read_bytes()
    with many.kept():
        dataclasses.make_dataclass("Another", ["another"])
    assert file.read_bytes() == before


def test_nothing_is_written_where_python_writes_no_bytecode(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    defined(Methods(file))
    assert not file.exists()


def test_a_folder_that_cannot_be_written_is_no_error(file: Path) -> None:
    file.parent.write_text("a file, not a folder")
    assert defined(Methods(file))(1).y == 1
