# SPDX-License-Identifier: Apache-2.0
import pytest

from megatron_ttrace.processes.logs import refusal


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("training ...\nttrace: no room\n", "no room"),
        ("ttrace: tracing the step\nKilled\n", ""),
        ("", ""),
    ],
)
def test_only_the_last_line_is_a_refusal(tmp_path, text, expected):
    """What another program wrote after it is what ended the run."""
    (tmp_path / "log").write_text(text)
    assert refusal(tmp_path / "log") == expected
