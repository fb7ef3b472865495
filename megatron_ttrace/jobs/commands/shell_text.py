# SPDX-License-Identifier: Apache-2.0
"""A shell's text as commands and their words, as far as no shell is needed for that."""

import re
from collections.abc import Mapping

from megatron_ttrace.trace.errors import TTraceError

UNKNOWN = "\0"
"""Marks what only a shell could evaluate, in texts whose other commands may contain it."""

_TOKEN = re.compile(
    r"""(?P<skip> [ \t\r]+ | \\[ \t]*\r?\n )
    | (?P<comment> (?<![^\s;&|]) \#[^\n]* )
    | (?P<redirection> (?:(?<!\S)(?:[0-9]+|\{\w+\}))? (?:&>>?|>>?&?|>\||<<<|<) [ \t]*
        (?! -\S ) (?: [^\s;&|<>'"\\(] | \\. | '[^']*' | "(?:[^"\\]|\\.)*" )+ (?=[\s;&|<>]|$) )
    | (?P<home> (?<!\S) ~ (?=[/\s]|$) )
    | (?P<strange> [<>] | (?<!\S) ~ | \$ (?=['"]) | \{ (?=[^\s{}]*(?:,|\.\.)[^\s{}]*\}) )
    | (?P<more> (?: \n [ \t\r]* (?:\#[^\n]*)? )+ (?= - ) )
    | (?P<end> [;&|\n] )
    | '(?P<single> [^']* )'
    | "(?P<double> (?:[^"\\]|\\.)* )"
    | \\(?P<escaped> . )
    | (?P<plain> (?: (?! \$['"] | \{[^\s{}]*(?:,|\.\.)[^\s{}]*\} ) [^\s;&|<>'"\\] )+ )""",
    re.VERBOSE | re.DOTALL,
)
"""One piece of a shell's text. A word is pieces without a gap."""

type Word = list[tuple[str, str]]
"""Pieces of a word, each with what it is in :data:`_TOKEN`.

Variables are replaced in ``plain`` ones, where their values are several words, and ``double`` ones.
"""


def statements(text: str, *, lines: bool = False) -> list[list[Word]]:
    """The commands of a text. Redirections and comments go.

    ``lines``: whether every line ends a statement, even if the next one begins with ``-``. Raises
    ``TTraceError`` when a quote is not closed, or has a meaning that only a shell knows.
    """
    found: list[list[Word]] = [[]]
    word: Word = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise TTraceError(
                f"the command cannot be split into words: close the quote at character {at + 1}"
            )
        at = match.end()
        kind = match.lastgroup or ""
        if kind in ("skip", "comment", "redirection", "more", "end"):
            if word:
                found[-1].append(word)
            word = []
            if kind == "end" or (kind == "more" and lines):
                found.append([])
            continue
        if kind == "strange" and not lines:
            raise TTraceError(
                f"{match[kind]!a}, character {at} of the command, is shell syntax that is not "
                "supported here: write what it stands for"
            )
        pieces = [(match[kind], kind)]
        if kind == "strange":
            pieces = [(f"{UNKNOWN}{match[kind]}", kind)]
        elif kind == "home":
            pieces = [("$HOME", "double")]
        if kind == "double":
            parts = re.split(r'(\\["\\$`\n])', match[kind])
            # Every second part is escaped.
            pieces = [
                (part[1:].strip("\n"), "escaped") if number % 2 else (part, kind)
                for number, part in enumerate(parts)
            ]
        word += pieces
    if word:
        found[-1].append(word)
    return [statement for statement in found if statement]


def words(statement: list[Word], known: Mapping[str, str], *, strict: bool = True) -> list[str]:
    """The words of a statement, with the values of variables. Raises as :func:`expand`."""
    found: list[str] = []
    assigns = True
    for word in statement:
        assigns &= word == [("export", "plain")] or bool(_ASSIGNED.match(word[0][0]))
        texts, is_empty = [""], True
        for part, kind in word:
            text = expand(part, known, strict=strict) if kind in ("plain", "double") else part
            splits = kind == "plain" and not assigns
            first, *more = re.split(r"[ \t\n]+", text) if splits else [text]
            texts = [*texts[:-1], texts[-1] + first, *more]
            is_empty &= splits
        found += list(filter(None, texts)) or ([] if is_empty else [""])
    return found


_ASSIGNED = re.compile(r"[A-Za-z_]\w*=")
_EXPANSION = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*)|[({@*#?0-9!$-])|`")


def expand(word: str, known: Mapping[str, str], *, strict: bool = True) -> str:
    """``$NAME`` and ``${NAME}``.

    Raises ``TTraceError`` if ``strict``, when a name is not known, or only a shell could evaluate
    it.
    """

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in known and not strict:
            return f"{UNKNOWN}{match[0]}"
        if name not in known:
            raise TTraceError(
                f"{match[0]!a} has no value here: put the value into the "
                "command, or use double quotes, in which the shell does"
            )
        return known[name]

    return _EXPANSION.sub(value, word)
