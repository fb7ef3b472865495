# SPDX-License-Identifier: Apache-2.0
"""The report that a person reads first, at the end of a job's log.

Logs are piped and 80 columns wide: no box drawing, no colour unless a terminal asks for it, the
answer on the first line and what to type next on the last. Names and paths are whole, to be copied.
"""

import shlex
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from megatron_ttrace.report import blame, table, wording
from megatron_ttrace.report.ledger import finding_text
from megatron_ttrace.trace import files
from megatron_ttrace.trace.blamed import Blame
from megatron_ttrace.trace.records import Culprit, Direction, Outcome, Result, Summary, Verdict
from megatron_ttrace.trace.sanitise import NAME_LIMIT, NOTE_LIMIT, clean, for_encoding

PIPED_WIDTH = 80
MIN_WIDTH = 24
_TABLE_WIDTH = 64
"""Of a page that has room for names and numbers side by side."""
MAX_WIDTH = 120
MAX_ROWS = 15
MAX_CULPRITS = 3
MAX_ALIKE = 6
MAX_OTHERS = 5
MAX_REASONS = 4
MAX_NOTICES = 5
MAX_UNEXERCISED = 8
MAX_COMMAND = 16
_LABEL = 11
_CODE: dict[str, Any] = {"drop_whitespace": False, "replace_whitespace": False}

_SHORT = {Outcome.REPLICA_CONFLICT: "conflict", Outcome.NONFINITE: "NaN, inf"}
STYLES = {
    Result.EQUIVALENT: "bold green",
    Result.DIVERGED: "bold red",
    Result.COULD_NOT_CHECK: "bold yellow",
}


def render(
    summary: Summary,
    verdicts: Sequence[Verdict],
    console: Console,
    directory: Path,
    isolating: Sequence[str] = (),
    isolated: tuple[Summary, Path] | None = None,
    said: set[str] | None = None,
) -> None:
    """Print the report of a check whose files are under ``directory``.

    ``isolating`` is the command that would check again with modules isolated, where it is known;
    ``isolated`` is its answer, with its directory, if it ran. ``said``, which is added to: what
    reports of the same command have already said of it.
    """
    said = set() if said is None else said
    page = _Page(console)
    page.answer(summary)
    if summary.blame is not None:
        _blame(page, summary.blame)
    if summary.verdict is Result.DIVERGED:
        _culprits(page, summary, verdicts)
    _counts(page, summary, verdicts)
    page.field("layout", wording.layout_text(summary.config))
    if summary.run and (code := repr(summary.run.megatron)) not in said:
        said.add(code)
        page.whole("Megatron", wording.code_text(summary.run.megatron))
        page.whole("checked by", f"megatron_ttrace {wording.code_text(summary.run.ttrace)}")
    if summary.verdict is Result.EQUIVALENT:
        _margins(page, verdicts)
    if text := wording.exactness_text(summary.exactness):
        lost = summary.exactness is not None and summary.exactness.lost
        page.field("exactness", text, "yellow" if lost else "")
    if summary.timings:
        times = [f"{clean(name, 40)} {took:.1f} s" for name, took in summary.timings.items()]
        page.field("time", ", ".join(times))
    notices = [
        ("findings about collectives", map(finding_text, summary.collective_findings)),
        ("changes", wording.changed_texts(summary)),
        ("notices", (clean(notice, NOTE_LIMIT) for notice in summary.notices)),
        ("not exercised", map(wording.not_exercised_text, summary.not_exercised)),
    ]
    for topic, sentences in notices:
        texts = [text for text in sentences if text not in said]
        said.update(texts)
        limit = MAX_UNEXERCISED if topic == "not exercised" else MAX_NOTICES
        for text in texts[:limit]:
            page.field("notice", text, "yellow")
        if len(texts) > limit:
            page.field("", f"{len(texts) - limit} more {topic} in {files.SUMMARY}", "yellow")
    if summary.verdict is not Result.EQUIVALENT:
        _layers(page, summary, verdicts)
        page.line()
    if isolated is not None:
        _isolated(page, *isolated)
    _next_steps(page, summary, directory, isolating, is_isolated=isolated is not None)


def say(console: Console, line: str) -> None:
    """Print one literal line, in characters that the log has."""
    _Page(console).line((line, ""))


def jobs(console: Console, answers: Mapping[str, int]) -> None:
    """Print how many jobs had each answer."""
    counts = [f"{n} {name.lower().replace('_', ' ')}" for name, n in answers.items() if n]
    _Page(console).field("jobs", f"{sum(answers.values())}: {', '.join(counts)}", "bold")


class _Page:
    """Writes lines of ``label  text`` with a hanging indent, cut to the width of the page."""

    def __init__(self, console: Console) -> None:
        self.console = console
        width = console.width if console.is_terminal else PIPED_WIDTH
        self.width = max(MIN_WIDTH, min(width, MAX_WIDTH))

    def line(self, *pieces: tuple[str, str]) -> None:
        """One line of styled pieces; the pieces are literal text, never markup."""
        text = Text.assemble(
            *((for_encoding(piece, self.console.encoding), style) for piece, style in pieces)
        )
        self.console.print(text, soft_wrap=True, highlight=False, markup=False, emoji=False)

    def answer(self, summary: Summary) -> None:
        """The first line, which goes on below where the page is narrow."""
        verdict = summary.verdict
        word, sentence = verdict.value, wording.result_text(summary)
        start = ("ttrace  ", "bold"), (word, STYLES[verdict])
        if len(f"ttrace  {word}  {sentence}") <= self.width:
            self.line(*start, (f"  {sentence}", ""))
            return
        self.line(*start)
        for line in self._wrapped(sentence, len("ttrace  ")):
            self.line((f"        {line}", ""))

    def _wrapped(self, value: str, indent: int = 0) -> list[str]:
        parts = Text(value).wrap(self.console, self.width - indent)
        return [part.plain.rstrip() for part in parts]

    def field(self, label: str, value: str, style: str = "") -> None:
        """A labelled paragraph."""
        self.labelled(label, self._wrapped(value, _LABEL) or [""], style)

    def whole(self, label: str, value: str, style: str = "") -> None:
        """A labelled paragraph with a path, which is not divided, so that it can be copied."""
        width = self.width - _LABEL
        lines = textwrap.wrap(value, width, break_long_words=False, break_on_hyphens=False)
        self.labelled(label, lines, style)

    def labelled(self, label: str, lines: Iterable[str], style: str = "") -> None:
        """Lines as they are, the first with the label."""
        for line in lines:
            self.line((label.ljust(_LABEL), "bold"), (line, style))
            label = ""

    def text(self, value: str, style: str = "") -> None:
        """A paragraph without a label."""
        for line in self._wrapped(value):
            self.line((line, style))

    def fields(self, label: str, values: Sequence[str], limit: int, more: str, style: str) -> None:
        """One paragraph per value under one label; ``more`` says where the others are."""
        for value in values[:limit]:
            self.field(label, value, style)
            label = ""
        if len(values) > limit:
            self.field("", more.format(len(values) - limit), style)


def _blame(page: _Page, blamed: Blame) -> None:
    """The changes that make the job diverge, and how that is known."""
    page.line()
    label = "blame"
    for change in blamed.changes[:MAX_CULPRITS]:
        for hunk in change.hunks[:MAX_ALIKE]:
            page.whole(label, blame.place(hunk), "bold red")
            label = ""
            for line in blame.lines(hunk):
                page.labelled("", textwrap.wrap(line, page.width - _LABEL, **_CODE) or [line])
        more = len(change.hunks) - MAX_ALIKE
        if more > 0:
            page.field("", f"and {more} more hunks, which only matter together")
        label = "and"
    if len(blamed.changes) > MAX_CULPRITS:
        page.field("", f"{len(blamed.changes) - MAX_CULPRITS} more changes in {files.HTML}")
    page.field("" if blamed.changes else "blame", blame.sentence(blamed))
    page.field("", f"({blame.effort(blamed)})")


def _culprits(page: _Page, summary: Summary, verdicts: Sequence[Verdict]) -> None:
    """Where the error starts; if no culprit was found, the worst verdict."""
    groups = table.by_cause(summary.culprits)
    for group in groups[:MAX_CULPRITS]:
        _culprit(page, group[0])
        if len(group) > 1:
            names = table.folded(group, summary.execution_order)
            relation = "with this cause" if group[0].cause else "alike"
            shown = wording.first_of(names, MAX_ALIKE)
            page.field("all", f"{len(group)} {relation}: {', '.join(shown)}")
    texts = []
    for group in groups[MAX_CULPRITS:]:
        likewise = f" (and {len(group) - 1} likewise)" if len(group) > 1 else ""
        texts.append(wording.sentence(group[0]) + likewise)
    page.fields("also", texts, MAX_OTHERS, f"and {{}} more in {files.HTML}", "")
    if not summary.culprits and (worst := table.worst_of(verdicts)) is not None:
        page.field("worst", wording.sentence(worst), "red")
        page.field("", "no single module could be named as the origin")
    page.line()


def _culprit(page: _Page, culprit: Culprit) -> None:
    page.line()
    page.field("culprit", wording.culprit_name(culprit), "bold red")
    tensor = f"{culprit.kind.value}.{culprit.index}, {wording.when_text(culprit)}"
    where = wording.on_ranks(culprit.ranks)
    page.field("direction", f"{culprit.direction.value} ({tensor}) on {where}")
    if culprit.rel_err is None and culprit.verdict is not Outcome.DIVERGED:
        page.field("error", f"not measurable: it {wording.OUTCOME_WORDS[culprit.verdict]}")
    elif culprit.rel_err is not None:
        tolerance = "no tolerance estimated"
        if culprit.tolerance is not None:
            tolerance = f"tolerance {wording.sci(culprit.tolerance)}, "
            tolerance += f"margin {wording.margin_text(culprit.margin)}"
        text = f"{wording.error_text(culprit)}, {tolerance} ({culprit.verdict.value})"
        page.field("error", text)
    page.field("reason", clean(culprit.reason, NOTE_LIMIT) or "-")
    for label, text in wording.cause_pairs(culprit):
        (page.whole if label in wording.PLACES else page.field)(label, text)


def _counts(page: _Page, summary: Summary, verdicts: Sequence[Verdict]) -> None:
    """How many tensors of each outcome; the unchecked ones with reasons, never hidden."""
    counts = summary.counts or table.tally(verdicts)
    failed = [
        f"{counts[outcome.value]:,} {outcome.value}"
        for outcome in Outcome
        if outcome.is_failure and counts.get(outcome.value)
    ]
    passed, unchecked = counts.get(Outcome.PASS, 0), counts.get(Outcome.UNCHECKED, 0)
    page.field(
        "tensors",
        f"{sum(counts.values()):,}: {passed:,} pass, {', '.join(failed) or '0 fail'}, "
        f"{unchecked:,} unchecked",
    )
    reasons = table.unchecked_reasons(verdicts)
    texts = [f"{number:,} {wording.reason_text(reason)}" for reason, number in reasons]
    page.fields("unchecked", texts, MAX_REASONS, f"{{}} more reasons in {files.HTML}", "yellow")


def _margins(page: _Page, verdicts: Sequence[Verdict]) -> None:
    """How close a pass came to failing, overall and per direction."""
    passes = [v for v in verdicts if v.verdict is Outcome.PASS and v.margin is not None]
    worst = table.worst_of(passes)
    if worst is None:
        return
    page.field(
        "worst",
        f"margin {wording.margin_text(worst.margin)}: "
        f"{wording.tensor_text(worst)}, error {wording.error_text(worst)}, "
        f"tolerance {wording.sci(worst.tolerance)}, {wording.on_ranks(worst.ranks)}",
    )
    by_direction = {direction: table.worst_of(passes, direction) for direction in Direction}
    margins = [
        f"{direction.value} {wording.margin_text(verdict.margin)}"
        for direction, verdict in by_direction.items()
        if verdict is not None
    ]
    page.field("margins", ", ".join(margins))


def _layers(page: _Page, summary: Summary, verdicts: Sequence[Verdict]) -> None:
    """The layers that fail, the first culprit's first, then as errors propagate.

    A name is never cut. One that is too long for its column is on lines of its own.
    """
    rows = table.failing_rows(verdicts, summary.culprits)
    if not rows:
        return
    width = max(page.width - 38, 0)
    page.line()
    is_table = page.width >= _TABLE_WIDTH
    header = f"{'worst tensor of each layer':<{width}} {'direction':<9}"
    columns = f" {'error':>9} {'margin':>8} {'failed':>8}"
    page.text(f"{header}{columns}" if is_table else "worst tensor of each layer", "bold")
    for row in rows[:MAX_ROWS]:
        worst = row.group.worst
        kind = f"{worst.kind.value}.{worst.index}" if worst.index else worst.kind.value
        name = f"{clean(worst.name, NAME_LIMIT)} {kind}"
        if cell_len(name) > width or not is_table:
            page.text(name)
            name = ""
        error = _SHORT.get(worst.verdict, worst.verdict.value)
        if worst.rel_err is not None:
            error = wording.share(worst.rel_err)
        failed = f"{row.group.failures}/{row.group.total}"
        if not is_table:
            numbers = f"{row.direction.value} {error}, margin {wording.margin_text(worst.margin)}, "
            page.field("", f"{numbers}{failed} failed")
            continue
        page.line(
            (f"{set_cell_size(name, width)} {row.direction.value:<9} {error:>9} ", ""),
            (f"{wording.margin_text(worst.margin):>8}", "red"),
            (f" {failed:>8}", ""),
        )
    if len(rows) > MAX_ROWS:
        page.text(f"and {len(rows) - MAX_ROWS} more rows with failures in {files.HTML}")


def _isolated(page: _Page, summary: Summary, directory: Path) -> None:
    """What the check with modules isolated found: each of its culprits fails on its own."""
    page.field("isolated", "every module was given the reference's inputs:", "bold")
    for text in wording.isolated_texts(summary.culprits):
        page.field("", text)
    page.field("", f"report: {clean(directory / files.HTML, NOTE_LIMIT)}")


def _next_steps(
    page: _Page,
    summary: Summary,
    directory: Path,
    isolating: Sequence[str],
    *,
    is_isolated: bool,
) -> None:
    """Where the files are and what to do next."""
    names = [n for n in (files.HTML, files.VERDICTS, files.SUMMARY) if (directory / n).exists()]
    page.labelled("files", [clean(directory / name, NOTE_LIMIT) for name in names])
    if summary.verdict is Result.COULD_NOT_CHECK:
        logs = [name for name in ("reference.log", "logs") if (directory / name).exists()]
        page.labelled("see logs", [clean(directory / name, NOTE_LIMIT) for name in logs])
    if summary.verdict is not Result.DIVERGED:
        return
    is_plain = not (summary.config.get("isolate") or "against" in summary.config)
    if summary.blame is None and is_plain and (text := blame.suggestion(summary.changed_code)):
        page.field("changes", text, "bold")
    open_page = f"open {files.HTML} in a browser"
    # What a step starts from, its updates and logged numbers have no module's inputs.
    apart = {Direction.START, Direction.UPDATE}
    narrows = not summary.culprits or any(c.direction not in apart for c in summary.culprits)
    # Runs with modules isolated cannot be compared with each other (docs/diff.md).
    if is_isolated or not (is_plain and narrows) or summary.blame is not None:
        page.field("next", open_page)
        return
    again = "give every module the reference's inputs, so that one bug shows in one module:"
    page.field("next", f"{open_page}, and {again}")
    command = shell_lines(isolating, page.width - _LABEL)
    if not 0 < len(command) <= MAX_COMMAND:
        fresh = clean(shlex.quote(f"{directory}-isolated"), NOTE_LIMIT)
        page.whole("", f"the same with --ttrace-isolate --ttrace-dir {fresh}", "bold")
        return
    page.labelled("", command, "bold")


def shell_lines(words: Sequence[str], width: int) -> list[str]:
    """A command that can be copied into a shell, on lines of at most ``width`` where words allow.

    A value stays on the line of its flag.
    """
    lines: list[str] = []
    pieces: list[str] = []
    for word in words:
        quoted = clean(shlex.quote(word), wording.COMMAND_LIMIT)
        if pieces and pieces[-1].startswith("--") and " " not in pieces[-1] and word[:1] != "-":
            pieces[-1] += f" {quoted}"
        else:
            pieces.append(quoted)
    for piece in pieces:
        if lines and len(lines[-1]) + len(piece) + 3 <= width:
            lines[-1] += f" {piece}"
        else:
            lines.append(f"    {piece}" if lines else piece)
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]
