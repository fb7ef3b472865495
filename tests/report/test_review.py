# SPDX-License-Identifier: Apache-2.0
"""How hosts of code read what is said of lines; all formats are seen in tests/cli/test_ci.py."""

from megatron_ttrace.report.review import Annotation, Level, workflow_command


def test_escapes():
    """As GitHub's toolkit escapes: the message, and more in properties."""
    one = Annotation(Level.ERROR, "a: 5 %, b", "10 %\r\nc: d, e", "x,y:z.py", 3)
    assert workflow_command(one) == (
        "::error file=x%2Cy%3Az.py,line=3,title=a%3A 5 %25%2C b::10 %25%0D%0Ac: d, e"
    )
