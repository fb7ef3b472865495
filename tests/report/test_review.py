# SPDX-License-Identifier: Apache-2.0
"""How hosts of code read what is said of lines; all formats are seen in tests/cli/test_ci.py."""

import json

from megatron_ttrace.report.review import (
    Annotation,
    Level,
    Topic,
    code_quality,
    text,
    workflow_command,
)


def test_escapes():
    """As GitHub's toolkit escapes: the message, and more in properties."""
    annotation = Annotation(
        Level.ERROR, Topic.DIVERGED, "a: 5 %, b", "10 %\r\nc: d, e", "x,y:z.py", 3
    )
    assert workflow_command(annotation) == (
        "::error file=x%2Cy%3Az.py,line=3,title=a%3A 5 %25%2C b::10 %25%0D%0Ac: d, e"
    )


def test_foreign_text_is_no_command():
    """Neither a file's name nor a message begins a line that a host of code obeys."""
    evil = "x\n::error file=a::b\r::add-mask::c ##[error]d\x1b[0Ksection_start:1:e"
    annotation = Annotation(Level.ERROR, Topic.DIVERGED, evil, evil, evil, 3)
    for shown in (text(annotation), workflow_command(annotation)):
        assert not any(line.strip().startswith("::") for line in shown.splitlines()[1:])
        assert "\x1b" not in shown
        assert "\r" not in shown
    assert "##[" not in text(annotation)
    assert len(workflow_command(annotation).splitlines()) == 1
    assert "\x1b" not in json.loads(code_quality([annotation]))[0]["description"]


def test_a_fingerprint_is_of_one_remark():
    """Also where two jobs diverge alike; the next report has the same ones."""
    alike = [Annotation(Level.ERROR, Topic.DIVERGED, "title", text, "a.py", 3) for text in "bc"]
    first, again = (
        [issue["fingerprint"] for issue in json.loads(code_quality(alike))] for _ in range(2)
    )
    assert first == again
    assert len(set(first)) == 2
