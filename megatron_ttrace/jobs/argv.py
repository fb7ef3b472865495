# SPDX-License-Identifier: Apache-2.0
"""Our flags on this process's command line, which a script does not see.

Megatron's parser gets them (``run/entry.py``); a script that reads ``sys.argv`` itself would refuse
them.
"""

import contextlib
import itertools
import sys
from collections import Counter
from collections.abc import Iterator, Sequence

from megatron_ttrace.jobs.settings import SWITCHES

_PREFIX = "--ttrace"

_script: list[str] = []
_taken: list[str] = []
_given: list[str] = []
"""The other words, before the script may have changed ``sys.argv``."""


def separated(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our flags with their values, and the other words. No value is checked."""
    ours: list[str] = []
    theirs: list[str] = []
    remaining = iter(words)
    for word in remaining:
        if not word.startswith(_PREFIX):
            theirs.append(word)
            continue
        ours.append(word)
        if "=" not in word and word not in SWITCHES:
            ours += itertools.islice(remaining, 1)
    return ours, theirs


def take() -> None:
    """Take our flags out of ``sys.argv``; they are kept here."""
    _script[:] = sys.argv[:1]
    ours, theirs = separated(sys.argv[1:])
    _taken.extend(ours)
    _given[:] = sys.argv[1:] = theirs


def remember() -> None:
    """Remember script and words of this process, before it may run another one or change them."""
    if not _script:
        take()


def script() -> str:
    """The script of this process, also while it runs another one (``runpy.run_path``)."""
    return (_script or sys.argv)[0]


def add(flags: Sequence[str]) -> None:
    """Act as if our flags had been on the command line."""
    _taken.extend(flags)


def ours() -> list[str]:
    """Our flags."""
    return [*_taken, *separated(sys.argv[1:])[0]]


def theirs() -> list[str]:
    """The other words."""
    return separated(sys.argv[1:])[1]


def words() -> list[str]:
    """All words of this process after its script, as they are now."""
    return [*sys.argv[1:], *_taken]


def given() -> list[str]:
    """The other words, as this process was given them."""
    return [*_given] if _script else theirs()


def kept() -> list[str]:
    """The given words that the script has taken out of ``sys.argv`` for itself; the last first."""
    left = Counter(theirs())
    kept = []
    for word in reversed(given()):
        if left[word]:
            left[word] -= 1
        else:
            kept.append(word)
    return kept


@contextlib.contextmanager
def put_back() -> Iterator[None]:
    """Within this context ``sys.argv`` has our flags, after all others."""
    before = sys.argv
    sys.argv = [*sys.argv, *_taken]
    try:
        yield
    finally:
        sys.argv = before
