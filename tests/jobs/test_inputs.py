# SPDX-License-Identifier: Apache-2.0
"""Pipes and devices are refused before anybody opens them."""

import argparse
import os
from pathlib import Path

import pytest

from megatron_ttrace.cli.main import main
from megatron_ttrace.jobs import inputs
from megatron_ttrace.trace.errors import TTraceError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a pipe in it, under every name that commands look for."""
    for name in ("meta.json", "summary.json", "text.txt"):
        os.mkfifo(tmp_path / name)
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ["report", "DIR"],
        ["compare", "DIR", "DIR"],
        ["data", "--output", "DIR/out", "DIR/text.txt"],
    ],
)
def test_commands(folder: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """One line, exit code 2, and no waiting."""
    assert main([word.replace("DIR", str(folder)) for word in words]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert "not a regular file" in line


@pytest.mark.parametrize("flag", ["data_path", "train_data_path"])
@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_data(tmp_path: Path, flag: str, suffix: str) -> None:
    """Also in a blend with weights."""
    os.mkfifo(tmp_path / f"two{suffix}")
    args = argparse.Namespace(
        **{flag: ["0.5", str(tmp_path / "one"), "0.5", str(tmp_path / "two")]}
    )
    with pytest.raises(TTraceError, match=rf"two\{suffix} is a pipe"):
        inputs.require_regular_data(args)


def test_devices_and_links(tmp_path: Path) -> None:
    """A link is what it leads to; what is absent is for others to refuse."""
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "broken").symlink_to(tmp_path / "nothing")
    inputs.require_regular(tmp_path / name for name in ("file", "link", "broken", "absent"))
    with pytest.raises(TTraceError, match="device is a pipe"):
        inputs.require_regular([tmp_path / "device"])
    os.mkfifo(tmp_path / "model")
    with pytest.raises(TTraceError, match="model is a pipe"):
        inputs.require_regular_data(argparse.Namespace(tokenizer_model=str(tmp_path / "model")))
