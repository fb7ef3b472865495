# SPDX-License-Identifier: Apache-2.0
"""The tests of the path that GPUs take, in a process of their own.

A registered device and Triton's interpreter stay for the life of a process, and are in the way of
tests that fork ranks.
"""

import pytest

from tests import programs


@pytest.mark.parametrize("cases", ["sums_on_a_device", "capture_on_a_device"])
def test_cases(cases: str) -> None:
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/compare/{cases}.py")
    done = programs.python(*words, timeout=840)
    assert done.returncode == 0, done.stdout + done.stderr
