# SPDX-License-Identifier: Apache-2.0
"""The collectives of traced steps, for people."""

from megatron_ttrace.report.wording import messages, on_ranks
from megatron_ttrace.trace import budget
from megatron_ttrace.trace.collectives import (
    Citation,
    LedgerFault,
    LedgerFinding,
    Operation,
    Phase,
    RanHere,
)
from megatron_ttrace.trace.sanitise import NOTE_LIMIT, beginning, clean, some_of

_SHOWN = 4
"""Collectives that a sentence names."""

_WHEN = messages(Phase)


def citation_text(cited: Citation | None) -> str:
    """What ran in a culprit, over which axes nothing was reduced, what its siblings ran."""
    if cited is None:
        return ""
    when = _WHEN[cited.direction]
    kinds = dict.fromkeys((ran.operation, ran.group, ran.dtype) for ran in cited.ran)
    names = [f"{operation} over {group} ({dtype})" for operation, group, dtype in kinds]
    clauses = [f"no collective ran {when}"]
    if names:
        clauses = [f"collectives {when}: {some_of(names, _SHOWN)}"]
    if cited.without and names:
        clauses.append(f"no reduction over {' or '.join(cited.without)}")
    elif cited.without:
        clauses = [f"no reduction over {' or '.join(cited.without)} ran {when}"]
    if cited.lacking:
        lacking = ", ".join(f"{operation} over {group}" for operation, group in cited.lacking)
        siblings = f"all {cited.siblings} of its siblings in other layers"
        if cited.siblings == 1:
            siblings = "its sibling in another layer"
        clauses.append(f"{siblings} ran {lacking}")
    return "; ".join(clauses)


def finding_text(finding: LedgerFinding) -> str:
    """One sentence about what is wrong with the collectives."""
    where = f"over {clean(finding.group, 60)} (ranks {beginning(finding.members, 8)})"
    if finding.groups > 1:
        more = finding.groups - 1
        where += f" and {more} more such group{'s' if more > 1 else ''}"
    if finding.fault is LedgerFault.ORDER:
        sides = " and ".join(on_ranks(ran.ranks) for ran in finding.ran[:3])
        return f"the same collectives {where} ran in different orders: {sides} disagree"
    words = (finding.operation or "", finding.reduction, clean(finding.dtype, 40))
    collective = " ".join(filter(None, words))
    size = f", {budget.shown(finding.bytes)}" if finding.bytes >= 0 else ""
    if finding.fault is LedgerFault.PRECISION:
        place = _place(finding.ran[0]) if finding.ran else ""
        return (
            f"{collective} {where}{size}{place}: a lower precision than expected "
            f"({clean(finding.expected, 40)})"
        )
    if finding.operation is Operation.SEND:
        collective = collective.replace("send", "message", 1)
        where = f"from rank {finding.members[0]} to rank {finding.members[-1]}"
        counts = (
            f"{'received' if number else 'sent'} {_times(ran.count)}{_place(ran)}"
            for number, ran in enumerate(finding.ran)
        )
        return f"{collective}{size} {where}: {', '.join(counts)}"
    counts = (f"{_times(ran.count)} on {on_ranks(ran.ranks)}{_place(ran)}" for ran in finding.ran)
    return f"{collective}{size} {where} ran unequally often: {'; '.join(counts)}"


def _times(count: int) -> str:
    return {0: "never", 1: "once"}.get(count, f"{count:,} times")


def _place(ran: RanHere) -> str:
    module = f" in {clean(ran.module, 240)}" if ran.module else ""
    return module + (f" at {clean(ran.where, NOTE_LIMIT)}" if ran.where else "")
