# SPDX-License-Identifier: Apache-2.0
"""The tests of the path that GPUs take, in a process of their own.

A registered device and Triton's interpreter stay for the life of a process, and are in the way of
tests that fork ranks.
"""

from tests import programs

CASES = ("tests/compare/sums_on_a_device.py", "tests/compare/capture_on_a_device.py")


def test_cases() -> None:
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", *CASES)
    programs.python(*words, timeout=840, code=0)
