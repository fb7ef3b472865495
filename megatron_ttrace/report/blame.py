# SPDX-License-Identifier: Apache-2.0
"""Which of the user's changes is to blame, in words."""

import re
import textwrap

from megatron_ttrace.report.wording import messages
from megatron_ttrace.trace.blamed import Blame, BlamedHunk, Blaming
from megatron_ttrace.trace.executed import ChangedCode, Execution
from megatron_ttrace.trace.sanitise import NOTE_LIMIT, clean

MOST_LINES = 12
"""Of a hunk."""
_SENTENCES = messages(Blaming)
RAN = messages(Execution, "Ran")
"""Where a hunk ran."""


def place(hunk: BlamedHunk) -> str:
    """``file:line (function)``."""
    function = clean(hunk.function) or "outside of functions"
    return f"{clean(hunk.file, NOTE_LIMIT)}:{hunk.line} ({function})"


def lines(hunk: BlamedHunk) -> list[str]:
    """The hunk as a diff without context, its indentation removed."""
    both = (*hunk.removed, *hunk.added)
    text = textwrap.dedent("".join(line.rstrip("\n") + "\n" for line in both))
    signs = ["-"] * len(hunk.removed) + ["+"] * len(hunk.added)
    shown = [
        f"{sign} {clean(line, NOTE_LIMIT)}".rstrip()
        for sign, line in zip(signs, text.split("\n"), strict=False)
    ]
    if len(shown) > MOST_LINES:
        more = len(shown) - MOST_LINES + 1
        shown[MOST_LINES - 1 :] = [f"  and {more} more lines"]
    return shown


def sentence(blame: Blame) -> str:
    """What was proven, and how."""
    count = len(blame.changes[0].hunks) if blame.changes else 0
    alone = these = "this hunk" if count == 1 else f"these {count} hunks"
    if len(blame.changes) > 1:
        alone, these = f"each of these {len(blame.changes)} changes", "them"
    since, reason = _since(blame), clean(blame.reason, NOTE_LIMIT)
    text = _SENTENCES[blame.result].format(alone=alone, these=these, since=since, reason=reason)
    if blame.result is Blaming.PROVEN and reason:
        text += f", except where {since} does, too: {reason}"
    return text


def _since(blame: Blame) -> str:
    """The good tree; of the id of a commit the first digits."""
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{28}\b", r"\1", clean(blame.since, NOTE_LIMIT))


def effort(blame: Blame) -> str:
    """How many hunks there are, and what the search took."""
    hunks = f"{blame.hunks} hunk{'s' if blame.hunks != 1 else ''}"
    idle = f", {blame.idle} did not run" if blame.idle else ""
    return f"{hunks} since {_since(blame)}{idle}; {blame.checks} checks, {blame.seconds:.0f} s"


def suggestion(changed: ChangedCode | None) -> str:
    """What to do about a job that diverges with changed code; empty if none of it may have run."""
    edits = [
        function for function in (changed.functions if changed else ()) if not function.replaces
    ]
    if changed is None or all(function.ran is Execution.NOT_RUN for function in edits):
        return ""
    since = clean(changed.since)
    if not all(function.line for function in edits):
        good = "--good ORIGINAL "  # of an edited wheel, which is not at hand
    else:
        good = "" if " " in since else f"--good {since} "
    command = f"ttrace blame {good}-- COMMAND"
    return f"your Megatron differs from {since}; {command} finds the change to blame"
