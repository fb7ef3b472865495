# SPDX-License-Identifier: Apache-2.0
"""The table of flags in docs/flags-and-files.md, made from their declaration.

``python -m tests.flags_document`` writes it anew; a test compares.
"""

from __future__ import annotations

import re

from megatron_ttrace.jobs.settings import CHECK, FLAGS, Flag
from tests.integration.jobs import ROOT

PATH = ROOT / "docs" / "flags-and-files.md"
BEGIN = "<!-- table made by: python -m tests.flags_document -->\n"
END = "<!-- end of the table -->\n"


def render() -> str:
    """The rows of all flags that users may give."""
    public = [flag for flag in (CHECK, *FLAGS.values()) if flag.help is not None]
    return "| flag | meaning |\n|---|---|\n" + "".join(map(_row, public))


def _row(flag: Flag) -> str:
    value = "|".join(flag.choices) or flag.metavar or ""
    shown = f"{flag.name} {value}".rstrip().replace("|", "\\|")
    meaning = re.sub(r"(?<!\w)'([^']+)'(?!\w)", r"`\1`", flag.help or "")
    meaning = re.sub(r"(--ttrace-[\w-]+)", r"`\1`", meaning)
    alias = f"In `ttrace check` and `ttrace record` also `{flag.alias}`." if flag.alias else ""
    return f"| `{shown}` | {' '.join(filter(None, (meaning, flag.details, alias)))} |\n"


def page(text: str) -> str:
    """The page with the table as it should be."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + render() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PATH.write_text(page(PATH.read_text(encoding="utf-8")), encoding="utf-8")
