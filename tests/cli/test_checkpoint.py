# SPDX-License-Identifier: Apache-2.0
"""``ttrace checkpoint``: its answers."""

import json

import pytest
import torch
from safetensors.torch import save_file

from megatron_ttrace.cli.main import main
from megatron_ttrace.saved.checkpoints import Comparison, Same, Tensor
from megatron_ttrace.saved.huggingface import converted
from megatron_ttrace.trace.states import State
from tests.saved.huggingface import made
from tests.saved.huggingface.test_converted import held, saved


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
    out = capsys.readouterr().out
    assert out.splitlines()[2] == "  a: different, relative error 1"
    assert main(["checkpoint", "--json", "one", "other"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["counts"] == {"different": 1, "same": 1}
    assert [row["name"] for row in answer["weights"]] == ["a", "b"]
    assert answer["same"] is False
    assert answer["optimizer"] == answer["numbers"] == answer["notices"] == []


def test_bad_input(capsys):
    for words in (["one", "absent"], ["one", "."], ["one"]):
        assert main(["checkpoint", *words]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_counts_are_of_all_tensors(monkeypatch, capsys):
    """A moment that differs is counted, too."""
    moment = Tensor("w", Same.DIFFERENT, state=State.EXP_AVG)
    answer = Comparison((Tensor("w", Same.SAME), moment))
    monkeypatch.setattr(converted, "compare_any", lambda a, b, weights_only: answer)
    assert main(["checkpoint", "--json", "one", "other"]) == 1
    assert json.loads(capsys.readouterr().out)["counts"] == {"same": 1, "different": 1}


def test_a_conversion(tmp_path, monkeypatch, capsys):
    """A model of Hugging Face and its conversion: what is wrong, and what was done to it."""
    config = made.CONFIGS["llama"]
    state = made.files(config)
    ours = made.converted(config, state)
    saved(tmp_path / "model", config, state)
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    monkeypatch.setattr(converted, "open_checkpoint", lambda folder: held(ours))
    assert main(["checkpoint", "model", "converted"]) == 0
    assert capsys.readouterr().out == "ttrace: the weights are the same\n  weight: 15 same\n"
    ours[name] = ours[name].roll(12, 0)
    assert main(["checkpoint", "model", "converted"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "  1 of the different ones: gate and up projection exchanged"
    assert lines[3].startswith(f"  {name}: different, relative error 1.")
    assert main(["checkpoint", "--json", "converted", "model"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert {row["name"]: row["cause"] for row in answer["weights"] if row["cause"]} == {
        name: "gate and up projection exchanged"
    }
