# SPDX-License-Identifier: Apache-2.0
"""``ttrace checkpoint``: its answers."""

import json

import pytest
import torch
from safetensors.torch import save_file

from megatron_ttrace.cli.main import main


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """Three checkpoints, of which two are the same."""
    monkeypatch.chdir(tmp_path)
    weights = {"a": torch.ones(2, 2), "b": torch.zeros(3)}
    for name, scale in (("one", 1), ("same", 1), ("other", 2)):
        (tmp_path / name).mkdir()
        save_file({n: w * scale for n, w in weights.items()}, tmp_path / name / "m.safetensors")


def test_answers(capsys):
    """The same, or which weights are not."""
    assert main(["checkpoint", "one", "same"]) == 0
    assert capsys.readouterr().out == "ttrace: the weights are the same\n  weight: 2 same\n"
    assert main(["checkpoint", "one", "other"]) == 1
    said = capsys.readouterr().out
    assert said.splitlines()[2] == "  a: different, relative error 1"
    assert main(["checkpoint", "--json", "one", "other"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["counts"] == {"different": 1, "same": 1}
    assert [one["name"] for one in found["weights"]] == ["a", "b"]
    assert found["same"] is False
    assert found["optimizer"] == found["numbers"] == found["notices"] == []


def test_bad_input(capsys):
    for words in (["one", "absent"], ["one", "."], ["one"]):
        assert main(["checkpoint", *words]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
