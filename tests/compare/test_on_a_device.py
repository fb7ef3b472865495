# SPDX-License-Identifier: Apache-2.0
"""The tests of the path that GPUs take, in processes of their own.

A registered device and Triton's interpreter stay for the life of a process, and are in the way of
tests that fork ranks.
"""

import pytest

from tests.integration.jobs import ROOT, python


@pytest.mark.parametrize(
    ("file", "cold"),
    [
        ("capture_on_a_device.py", False),
        # Triton asks for the interpreter when it is imported.
        ("sums_on_a_device.py", True),
    ],
)
def test_cases(file: str, cold: bool) -> None:
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/compare/{file}")
    python(*words, cwd=ROOT, cold=cold, code=0)
