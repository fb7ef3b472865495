# SPDX-License-Identifier: Apache-2.0
"""Bad input of ``ttrace baselines``, under its name and its former one."""

import pytest

from megatron_ttrace import __main__


@pytest.mark.parametrize("command", ["baselines", "rivals"])
@pytest.mark.parametrize("words", [(), ("99",), ("--healthy", "no-such-layout")])
def test_bad_input(
    capsys: pytest.CaptureFixture[str], command: str, words: tuple[str, ...]
) -> None:
    """One line, exit code 2."""
    assert __main__.main([command, *words]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
