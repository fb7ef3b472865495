# SPDX-License-Identifier: Apache-2.0
"""Bad input of ``python -m tests.assay baselines``."""

import pytest

from tests.assay import __main__


@pytest.mark.parametrize("words", [(), ("99",), ("--healthy", "no-such-layout")])
def test_bad_input(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    """One line, exit code 2."""
    assert __main__.main(["baselines", *words]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
