# SPDX-License-Identifier: Apache-2.0
"""Our flags on this process's command line, which a script does not see.

Megatron's parser gets them (``run/entry.py``); a script that reads ``sys.argv`` itself would refuse
them.
"""

import contextlib
import itertools
import sys
from collections.abc import Iterator, Sequence

from megatron_ttrace.jobs.settings import SWITCHES

_PREFIX = "--ttrace"

_script: list[str] = []
_taken: list[str] = []


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
    sys.argv[1:] = theirs


def remember() -> None:
    """Remember the script of this process, before it may run another one."""
    _script[:] = _script or sys.argv[:1]


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
    """All words that this process was given after its script."""
    return [*sys.argv[1:], *_taken]


@contextlib.contextmanager
def put_back() -> Iterator[None]:
    """Within this context ``sys.argv`` has our flags, after all others."""
    before = sys.argv
    sys.argv = [*sys.argv, *_taken]
    try:
        yield
    finally:
        sys.argv = before
