# SPDX-License-Identifier: Apache-2.0
"""What Megatron and transformers do differently by design."""

from pathlib import Path

from megatron_ttrace.saved.huggingface.differences import DIFFERENCES, Effect

PAGE = Path(__file__).parents[3] / "docs" / "huggingface.md"


def test_the_page_has_the_list() -> None:
    """Every difference is a row of the table, in this order."""
    rows = [f"| {row.what} | {row.why} | {row.effect} |" for row in DIFFERENCES]
    assert "\n".join(rows) in PAGE.read_text(), "\n".join(["docs/huggingface.md needs:", *rows])


def test_refusals_and_notices_say_what_to_do() -> None:
    """In one line each."""
    shown = [
        difference
        for difference in DIFFERENCES
        if difference.effect in (Effect.REFUSED, Effect.NOTICE)
    ]
    assert shown
    assert all(
        difference.instead and "\n" not in difference.why + difference.instead
        for difference in shown
    )
