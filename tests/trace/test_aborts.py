# SPDX-License-Identifier: Apache-2.0
"""A process that is aborted says why, and ends as it would have."""

import signal
import subprocess
import sys

import pytest

from megatron_ttrace.trace import compiled

CHILD = """
import ctypes, faulthandler, os, signal, sys, threading, time
from megatron_ttrace.trace import aborts
case = sys.argv[1]
if case == "another":
    faulthandler.enable()
stop = aborts.before(lambda: print("said", flush=True), 9)
if case == "raises":
    stop = aborts.before(lambda: 1 / 0, 9)
if case == "stopped":
    stop()
if case == "child":
    pid = os.fork()
    if pid == 0:
        os.abort()
    print(-os.WTERMSIG(os.waitpid(pid, 0)[1]))
    os._exit(0)
if case == "locked":
    os.abort()  # with Python's lock
ctypes.CDLL(None).abort()  # without
"""


@pytest.mark.skipif(compiled.load("trace.aborts") is None, reason="not compiled")
@pytest.mark.parametrize(
    ("case", "printed"),
    [
        *(("plain", "said"), ("stopped", ""), ("another", ""), ("locked", ""), ("raises", "")),
        ("child", "-6"),
    ],
)
def test_a_last_word(case: str, printed: str) -> None:
    """Of this process alone, if nobody else handles SIGABRT; it ends even if it has no time."""
    words = [sys.executable, "-c", CHILD, case]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)
    code = 0 if case == "child" else -signal.SIGABRT
    assert (done.returncode, done.stdout.strip()) == (code, printed), done.stderr
