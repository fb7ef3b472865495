# SPDX-License-Identifier: Apache-2.0
"""How our errors end a rank before its run starts."""

import pytest

from megatron_ttrace.errors import DEBUG, TTraceError
from megatron_ttrace.runtime.entry import exits_on_user_error


def test_an_unexpected_error_of_a_checked_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line and exit code 2: Python's own 1 would mean that the run diverged."""
    monkeypatch.delenv(DEBUG, raising=False)
    with pytest.raises(SystemExit) as ended, exits_on_user_error(unexpected=True):
        raise KeyError("a\nb")
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("ttrace: could not start: KeyError: ")
    assert said.count("\n") == 1


def test_an_unexpected_error_of_another_run() -> None:
    """A run that is not checked ends as without this package."""
    with pytest.raises(KeyError), exits_on_user_error():
        raise KeyError


@pytest.mark.parametrize("unexpected", [False, True])
def test_an_error_that_the_user_can_fix(
    unexpected: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error's own message."""
    with pytest.raises(SystemExit) as ended, exits_on_user_error(unexpected=unexpected):
        raise TTraceError("no")
    assert ended.value.code == 2
    assert capsys.readouterr().err == "ttrace: no\n"


def test_what_megatron_s_parser_does() -> None:
    """The parser's own exit is not changed."""
    with pytest.raises(SystemExit) as ended, exits_on_user_error(unexpected=True):
        raise SystemExit(7)
    assert ended.value.code == 7
