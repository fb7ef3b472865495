# SPDX-License-Identifier: Apache-2.0
"""JUnit XML, so that CI systems show a check as tests: one case per layer and direction.

:func:`clean` leaves no character that XML does not allow.
"""

import xml.etree.ElementTree as ET
from collections.abc import Sequence

from megatron_ttrace.report import table, wording
from megatron_ttrace.trace.records import Result, Summary, Verdict
from megatron_ttrace.trace.sanitise import NOTE_LIMIT, clean


def render(summary: Summary, verdicts: Sequence[Verdict], run: str = "") -> str:
    """The XML as text. A check that could not be made is an error, not a pass."""
    rows = sorted(table.layer_rows(verdicts), key=lambda row: (row.depth, row.direction.value))
    blocked = summary.verdict is Result.COULD_NOT_CHECK
    suite = ET.Element(
        "testsuite",
        name="ttrace",
        tests=str(len(rows) + blocked),
        failures=str(sum(bool(row.group.failures) for row in rows)),
        errors=str(int(blocked)),
        skipped=str(sum(_is_skipped(row) for row in rows)),
        time=f"{sum(summary.timings.values()):.3f}",
    )
    if run:
        properties = ET.SubElement(suite, "properties")
        ET.SubElement(properties, "property", name="ttrace.run", value=clean(run))
    if blocked:
        case = ET.SubElement(suite, "testcase", classname="ttrace", name="check")
        why = "; ".join(clean(notice, NOTE_LIMIT) for notice in summary.notices)
        ET.SubElement(case, "error", message=why or "could not check")
    for row in rows:
        case = ET.SubElement(
            suite,
            "testcase",
            classname=f"ttrace.{clean(row.layer)}",
            name=row.direction.value,
        )
        worst = row.group.worst
        if row.group.failures:
            failure = ET.SubElement(
                case,
                "failure",
                type=worst.verdict.value,
                message=wording.sentence(worst),
            )
            failure.text = _failure_text(summary, row)
        elif _is_skipped(row):
            ET.SubElement(case, "skipped", message=clean(worst.note, NOTE_LIMIT))
    ET.indent(suite)
    return ET.tostring(suite, encoding="unicode", xml_declaration=False) + "\n"


def _is_skipped(row: table.LayerRow) -> bool:
    return row.group.unchecked == row.group.total


def _failure_text(summary: Summary, row: table.LayerRow) -> str:
    """How many fail here, and where the error starts."""
    lines = [f"{row.group.failures} of {row.group.total} tensors fail"]
    for group in table.by_cause(summary.culprits)[:3]:
        culprit = group[0]
        lines.append(f"culprit: {wording.sentence(culprit)}")
        if len(group) > 1:
            lines.append(f"all: {', '.join(table.folded(group, summary.execution_order))}")
        lines.append(f"reason: {clean(culprit.reason, NOTE_LIMIT)}")
        lines += [f"{label}: {text}" for label, text in wording.cause_pairs(culprit)]
    return "\n".join(lines)
