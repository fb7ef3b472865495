# SPDX-License-Identifier: Apache-2.0
"""Configurations of Megatron-LM's functional tests as commands."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.jobs.commands import recipe_file
from megatron_ttrace.trace.errors import TTraceError

NAMES = st.from_regex(r"--[a-z][a-z-]{0,20}", fullmatch=True)
VALUES = st.one_of(
    st.just(True),
    st.integers(),
    st.from_regex(r"[A-Za-z0-9_.,|*+$/{}-]{1,20}", fullmatch=True),
    st.lists(st.from_regex(r"[a-z_]{1,10}", fullmatch=True), min_size=1, max_size=4),
)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A tree with the files that say what is trained."""
    root = tmp_path_factory.mktemp("checkout")
    (root / "megatron").mkdir()
    (root / "pretrain_gpt.py").touch()
    (root / "pretrain_mamba.py").touch()
    return root


def write(checkout, family="gpt", **content):
    """A configuration."""
    path = checkout / "tests/functional_tests/test_cases" / family / "one/model_config.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(content))
    return path


@given(values=st.dictionaries(NAMES, VALUES, max_size=5))
def test_values_become_words(checkout, values):
    """A switch alone, a list as several words, anything else as one."""
    expected = []
    for name, value in sorted(values.items()):
        if value is True or str(value).lower() == "true":
            expected.append(name)
        elif isinstance(value, list):
            expected += [name, *value]
        else:
            expected += [name, str(value)]
    assert list(recipe_file.read(write(checkout, MODEL_ARGS=values)).arguments) == expected


def test_values_that_are_quoted_or_bracketed(checkout):
    """As the tests' shell script makes them."""
    values = {
        "--moe-layer-freq": "([0]*3+[1]*2)",
        "--a": "[x y]",
        "--b": "0:4 2B:8",
        "--c": "1e-5",
        "--d": "'99,1,0'",
        "--e": r"\"*E\"",
        "--f": '"it',
    }
    command = recipe_file.read(write(checkout, MODEL_ARGS=values, ENV_VARS={"A": 1}))
    assert command.arguments == (
        *("--a", "x", "y", "--b", "0:4 2B:8", "--c", "1e-5", "--d", "99,1,0"),
        *("--e", "*E", "--f", '"it'),
        *("--moe-layer-freq", "([0]*3+[1]*2)"),
    )
    assert command.environment == {"A": "1"}


def test_options_by_name(checkout):
    """Those of Megatron-LM's examples: a switch that is off is no flag."""
    arguments = {"moe_router_topk": 8, "finetune": False, "bf16": True, "lr": "3.9e-06"}
    command = recipe_file.read(write(checkout, ARGS=arguments))
    assert command.arguments == ("--bf16", "--lr", "3.9e-06", "--moe-router-topk", "8")
    for other in (["a"], {"a b": 1, "bf16": True}):
        with pytest.raises(recipe_file.NoTrainingError, match="has no arguments"):
            recipe_file.read(write(checkout, ARGS=other))


@pytest.mark.parametrize(
    ("sizes", "ranks"),
    [
        ({}, 8),
        ({"tensor-model": 2, "pipeline-model": 2}, 8),
        ({"tensor-model": 8, "pipeline-model": 2}, 16),
        ({"pipeline-model": 3}, 24),
        ({"expert-model": 64, "expert-tensor": 1, "tensor-model": 2}, 64),
    ],
)
def test_ranks(checkout, sizes, ranks):
    """Eight on a machine, and as many machines as the layout needs."""
    values = {f"--{axis}-parallel-size": size for axis, size in sizes.items()}
    command = recipe_file.read(write(checkout, MODEL_ARGS={**values, "--num-experts": 64}))
    assert (command.ranks, command.nodes) == (ranks, ranks // 8)


def test_the_script_is_the_checkouts(checkout):
    """By family, and by what is trained."""
    command = write(checkout, MODEL_ARGS={"--a": 1})
    assert recipe_file.read(command).script == str(checkout / "pretrain_gpt.py")
    hybrid = write(checkout, MODEL_ARGS={"--hybrid-layer-pattern": "M*"})
    assert recipe_file.read(hybrid).script == str(checkout / "pretrain_mamba.py")
    with pytest.raises(TTraceError, match=r"needs examples/t5/pretrain_t5.py or pretrain_t5.py"):
        recipe_file.read(write(checkout, "t5", MODEL_ARGS={}))


def test_a_script_in_a_folder_imports_from_the_checkout(checkout, monkeypatch):
    """As in Megatron's tests: T5's script imports ``pretrain_gpt``."""
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    script = checkout / "examples/bert/pretrain_bert.py"
    script.parent.mkdir(parents=True)
    script.touch()
    command = recipe_file.read(write(checkout, "bert", MODEL_ARGS={}))
    assert command.script == str(script)
    assert command.environment == {"PYTHONPATH": f"{checkout}:/theirs"}


@pytest.mark.parametrize(
    "content",
    [
        {"MODEL_ARGS": {"--a": 1}, "MODE": "inference"},
        {"MODEL_ARGS": {"trainer.devices": 8}},
        {"MODEL_ARGS": None},
    ],
)
def test_what_is_no_training(checkout, content):
    """Is told apart from what is broken."""
    with pytest.raises(recipe_file.NoTrainingError):
        recipe_file.read(write(checkout, **content))


@pytest.mark.parametrize("text", ["[", "- a", "a: 1", ""])
def test_a_broken_file(tmp_path, text):
    """One line with its name."""
    path = tmp_path / "model_config.yaml"
    path.write_text(text)
    with pytest.raises(TTraceError, match=r"model_config.yaml") as raised:
        recipe_file.read(path)
    assert "\n" not in str(raised.value)
    with pytest.raises(TTraceError, match="cannot be read"):
        recipe_file.read(tmp_path / "absent.yaml")
