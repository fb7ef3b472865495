# SPDX-License-Identifier: Apache-2.0
"""Annotations of lines of a repository, in the formats that hosts of code read."""

import dataclasses
import hashlib
import json
from collections import Counter
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
    """No recipe runs this changed code: nothing is known about it."""
    RECIPE = "recipe"
    """The pull request changes, breaks or removes a recipe."""


@dataclasses.dataclass(frozen=True, slots=True)
class Annotation:
    """A remark on a line of the checkout, or on the whole of it if ``file`` is empty."""

    level: Level
    topic: Topic
    title: str
    message: str
    file: str = ""
    line: int = 0


def workflow_command(annotation: Annotation) -> str:
    """As a workflow command of GitHub Actions, which escapes its delimiters as URLs do."""

    def data(text: str) -> str:
        text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
        return clean(text, _MOST)

    def value(text: object) -> str:
        return data(str(text)).replace(":", "%3A").replace(",", "%2C")

    where = [f"file={value(annotation.file)}", f"line={annotation.line}"] if annotation.file else []
    properties = ",".join([*where, f"title={value(annotation.title)}"])
    return f"::{annotation.level} {properties}::{data(annotation.message)}"


def code_quality(annotations: Sequence[Annotation]) -> str:
    """As a code quality report of GitLab, which holds remarks on lines only.

    A fingerprint is the same in the next report, and no other remark's in this one: GitLab drops
    the second.
    """
    severities = {Level.ERROR: "critical", Level.WARNING: "minor", Level.NOTICE: "info"}
    alike: Counter[tuple[str, str]] = Counter()
    issues = []
    for annotation in annotations:
        if not annotation.file:
            continue
        about = annotation.file, annotation.title
        lines = f"{annotation.title}. {annotation.message}".splitlines()
        issues.append(
            {
                "description": "\n".join(clean(line, _MOST) for line in lines),
                "check_name": f"ttrace/{annotation.topic}",
                "fingerprint": hashlib.sha256(repr((*about, alike[about])).encode()).hexdigest(),
                "severity": severities[annotation.level],
                "location": {"path": annotation.file, "lines": {"begin": annotation.line}},
            }
        )
        alike[about] += 1
    return json.dumps(issues, indent=1)


def records(annotations: Sequence[Annotation]) -> str:
    """As JSON: a list of objects with the fields of :class:`Annotation`."""
    return json.dumps([dataclasses.asdict(annotation) for annotation in annotations], indent=1)


def text(annotation: Annotation) -> str:
    """For people, and for logs."""
    where = f"{annotation.file}:{annotation.line}: " if annotation.file else ""
    lines = [f"{where}{annotation.level}: {annotation.title}", *annotation.message.split("\n")]
    return "\n    ".join(map(log_line, lines))
