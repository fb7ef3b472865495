# SPDX-License-Identifier: Apache-2.0
"""What a parent of ranks computes for them is what Megatron would."""

import argparse
import inspect

import pytest

from megatron_ttrace.jobs.processes import preload

arguments = pytest.importorskip("megatron.training.arguments")


def helps() -> dict[str, str | None]:
    """The help texts of Megatron's flags."""
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return {action.dest: action.help for action in parser._actions}


def test_help_texts_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the same, and no source is read again."""
    from megatron.training import argument_utils

    factory = argument_utils.ArgumentGroupFactory
    own = helps()
    monkeypatch.setattr(factory, "_get_field_docstrings", factory._get_field_docstrings)
    preload._remember_help_texts.__wrapped__()
    monkeypatch.setattr(inspect, "getsource", None)
    assert helps() == own
    assert any(own.values())


@pytest.mark.parametrize(
    ("words", "accepted"),
    [
        ((), True),
        (("--num-layers", "2", "--bf16"), True),
        (("--num-layers", "2", "--no-such-flag"), False),
        (("--num-layers", "two"), False),
        (("--num-layer", "2"), False),
    ],
)
def test_accepted_arguments(words, accepted, capsys):
    """Megatron's parser decides, and nothing is printed."""
    assert preload.accepts(words) is accepted
    assert capsys.readouterr() == ("", "")
