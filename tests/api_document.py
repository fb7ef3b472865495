# SPDX-License-Identifier: Apache-2.0
"""The reference part of the page on Python, made from the docstrings where the site is built."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import megatron_ttrace

MARK = "<!-- the site has the reference here: tests/api_document.py -->\n"
DESCRIBED = ("check", "compare", "load_report", "enable", "step", "is_reference", "Report")
RECORDS = ("Summary", "Verdict", "Culprit", "Result", "Outcome", "Kind", "TTraceError")
_SECTION = re.compile(r"(Args|Returns|Raises|Attributes):")


def on_page_markdown(markdown: str, **context: Any) -> str:
    """Called by mkdocs with every page."""
    return markdown.replace(MARK, render()) if MARK in markdown else markdown


def render() -> str:
    """The reference of all public names."""
    records = {name: _summary(getattr(megatron_ttrace, name)) for name in RECORDS}
    listed = [_listed(f"`{name}`: {summary}") for name, summary in records.items()]
    return "\n".join([*map(_entry, DESCRIBED), "## Records", "", *listed, ""])


def _entry(name: str) -> str:
    value = getattr(megatron_ttrace, name)
    parts = [f"## `{name}`\n"]
    if inspect.isfunction(value):
        parts.append(f"```python\n{_signature(name, value)}\n```\n")
    parts.append("\n".join(_markdown(inspect.getdoc(value) or "")).strip("\n") + "\n")
    if isinstance(value, type):
        parts.append("\n".join(_members(value)) + "\n")
    return "\n".join(parts)


def _summary(value: Any) -> str:
    """The first paragraph of its docstring."""
    text = inspect.getdoc(value) or ""
    return _literal(" ".join(text.partition("\n\n")[0].split()))


def _listed(text: str) -> str:
    """A list item, in lines of the documents' length."""
    return textwrap.fill(f"- {text}", 118, subsequent_indent="  ", break_on_hyphens=False)


def _signature(name: str, function: Any) -> str:
    """One parameter per line, as the source has it."""
    signature = inspect.signature(function)
    lines, marked = [], False
    for one in signature.parameters.values():
        if one.kind is one.KEYWORD_ONLY and not marked:
            lines.append("    *,")
            marked = True
        default = json.dumps(one.default) if isinstance(one.default, str) else repr(one.default)
        default = "" if one.default is one.empty else f" = {default}"
        lines.append(f"    {one.name}: {one.annotation}{default},")
    inside = "\n".join(["", *lines, ""]) if lines else ""
    return f"def {name}({inside}) -> {signature.return_annotation}"


def _members(value: type) -> Iterator[str]:
    """Properties and methods with what they are."""
    names = dict.fromkeys(name for kind in value.__mro__ for name in vars(kind))
    members = {name: inspect.getattr_static(value, name) for name in names}
    for name, member in members.items():
        if name.startswith("_") or not (isinstance(member, property) or inspect.isfunction(member)):
            continue
        call = "" if isinstance(member, property) else "()"
        yield _listed(f"`.{name}{call}`: {_summary(member)}")


def _markdown(doc: str) -> Iterator[str]:
    """A docstring of Google's form; entries of its sections become lists."""
    within = ""
    for paragraph in re.split(r"\n\n+", doc):
        head, _, body = paragraph.partition("\n")
        match = _SECTION.fullmatch(head)
        if match:
            within = match[1]
            yield f"{within}:\n"
            yield from _items(within, textwrap.dedent(body))
        else:
            yield _literal(paragraph)
        yield ""


def _items(section: str, body: str) -> Iterator[str]:
    for item in re.split(r"\n(?! )", body):
        text = " ".join(item.split())
        name, colon, what = text.partition(": ")
        named = section != "Returns" and colon and re.fullmatch(r"\w+", name)
        yield _listed(f"`{name}`: {_literal(what)}") if named else _literal(text)


def _literal(text: str) -> str:
    """Code as Markdown has it; roles of Sphinx are left out."""
    return re.sub(r":\w+:`([^`]*)`", r"`\1`", text.replace("``", "`"))
