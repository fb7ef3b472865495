# SPDX-License-Identifier: Apache-2.0
"""What is said of lines of a repository, as hosts of code read it in the log of a job."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from enum import StrEnum

from megatron_ttrace.trace.sanitise import clean, log_line

_MOST = 8000
"""Characters of a message."""


class Level(StrEnum):
    """How bad an annotation is, in GitHub's words."""

    ERROR = "error"
    WARNING = "warning"
    NOTICE = "notice"


class Topic(StrEnum):
    """What an annotation is about."""

    DIVERGED = "diverged"
    """The pull request makes a job diverge."""
    SUSPECT = "suspect"
    """A job diverges that ran this changed code; which change is to blame is not known."""
    DIVERGED_BEFORE = "diverged_before"
    """A job diverges in the same modules without the pull request."""
    NOT_CHECKED = "not_checked"
    """A job cannot be checked."""
    NOT_EXECUTED = "not_executed"
    """No recipe runs this changed code: nothing is known of it."""
    RECIPE = "recipe"
    """The pull request changes, breaks or removes a recipe."""


@dataclasses.dataclass(frozen=True, slots=True)
class Annotation:
    """What is said of a line of the checkout; of none if ``file`` is empty."""

    level: Level
    topic: Topic
    title: str
    message: str
    file: str = ""
    line: int = 0


def workflow_command(one: Annotation) -> str:
    """As a workflow command of GitHub Actions, which escapes its delimiters as URLs do."""

    def data(text: str) -> str:
        text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
        return clean(text, _MOST)

    def value(text: object) -> str:
        return data(str(text)).replace(":", "%3A").replace(",", "%2C")

    where = [f"file={value(one.file)}", f"line={one.line}"] if one.file else []
    return f"::{one.level} {','.join([*where, f'title={value(one.title)}'])}::{data(one.message)}"


def code_quality(found: Sequence[Annotation]) -> str:
    """As a code quality report of GitLab, which only holds what is said of lines."""
    severities = {Level.ERROR: "critical", Level.WARNING: "minor", Level.NOTICE: "info"}
    issues = [
        {
            "description": "\n".join(
                clean(line, _MOST) for line in f"{one.title}. {one.message}".splitlines()
            ),
            "check_name": f"ttrace/{one.topic}",
            "fingerprint": hashlib.sha256(f"{one.file} {one.title}".encode()).hexdigest(),
            "severity": severities[one.level],
            "location": {"path": one.file, "lines": {"begin": one.line}},
        }
        for one in found
        if one.file
    ]
    return json.dumps(issues, indent=1)


def records(found: Sequence[Annotation]) -> str:
    """As JSON: a list of objects with the fields of :class:`Annotation`."""
    return json.dumps([dataclasses.asdict(one) for one in found], indent=1)


def text(one: Annotation) -> str:
    """For people, and for logs."""
    where = f"{one.file}:{one.line}: " if one.file else ""
    lines = [f"{where}{one.level}: {one.title}", *one.message.split("\n")]
    return "\n    ".join(map(log_line, lines))
