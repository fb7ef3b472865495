# SPDX-License-Identifier: Apache-2.0
"""The table of releases and their differences in docs/cpu-te.md.

``python -m tests.cpu.te.document`` writes it anew; a test compares.
"""

from itertools import groupby

from megatron_ttrace.cpu.te.differences import DIFFERENCES, Argument, Change, Name
from megatron_ttrace.cpu.te.releases import KNOWN, PINNED
from tests.integration.jobs import ROOT

PATH = ROOT / "docs" / "cpu-te.md"
BEGIN = "<!-- made by: python -m tests.cpu.te.document -->\n"
END = "<!-- end of releases -->\n"


def render():
    """Between the marks: which release is emulated, and what each release changed."""
    lines = ["| megatron-core | TransformerEngine |", "|---|---|"]
    lines += [f"| {series} | {release} |" for series, release in PINNED.items()]
    known = ", ".join(str(release).removesuffix(".0") for release in KNOWN)
    lines += ["", f"Releases that can be emulated: {known}.", ""]
    lines += ["| since | is so | before | in TransformerEngine |", "|---|---|---|---|"]
    for _, group in groupby(DIFFERENCES, key=_place):
        rows = list(group)
        path, _, change = rows[0].source.partition(" ")
        release = str(rows[0].release).removesuffix(".0")
        says = "; ".join(_folded(rows))
        lines.append(f"| {release} | {says} | {rows[0].before} | `{path}` {change} |")
    return BEGIN + "".join(f"{line}\n" for line in lines) + END


def _place(row):
    return row.release, row.source, row.says if isinstance(row.what, Change) else type(row.what)


def _folded(rows):
    """Sentences; the names of one function or module in one."""
    for owner, same in groupby(rows, key=_owner):
        names = ", ".join(f"`{row.what.name}`" for row in same) if owner else ""
        yield f"{owner} {names}" if owner else rows[0].says


def _owner(row):
    if isinstance(row.what, Argument):
        return f"`{row.what.function}` takes"
    return f"`transformer_engine.{row.what.module}` has" if isinstance(row.what, Name) else ""


def replaced(text):
    """``text`` with the table in the place of the one that it has."""
    before, _, rest = text.partition(BEGIN)
    return before + render() + rest.partition(END)[2]


if __name__ == "__main__":
    PATH.write_text(replaced(PATH.read_text(encoding="utf-8")), encoding="utf-8")
