# SPDX-License-Identifier: Apache-2.0
"""Train with one function of the checker made to fail on one rank.

``FAULT=module:Class.function@rank`` in the environment; ``=N`` after it for the N-th call,
``=always`` for all, and ``!name`` for another kind of failure: ``kill``, ``full`` (no space left),
``memory``. The losses are printed by ``bits.py``.
"""

import errno
import functools
import importlib
import os
import re
import runpy
import signal
import sys
from pathlib import Path

import megatron_ttrace

megatron_ttrace.enable()


class InjectedError(Exception):
    """What the checker does not expect."""


def fail(kind: str) -> None:
    """Fail in one of several ways."""
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "full":
        raise OSError(errno.ENOSPC, "No space left on device")
    if kind == "memory":
        raise MemoryError("cannot allocate")
    raise InjectedError("injected")


def inject(fault: str) -> None:
    """Replace the function on its rank."""
    pattern = r"([\w.]+):([\w.]+)@(\d+)(?:=(\w+))?(?:!(\w+))?"
    module, path, rank, number, kind = re.fullmatch(pattern, fault).groups()
    owner = importlib.import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    original = vars(owner)[name]
    calls = 0

    @functools.wraps(original)
    def failing(*args, **kwargs):
        nonlocal calls
        calls += 1
        now = number == "always" or calls == int(number or 1)
        if now and int(os.environ["RANK"]) == int(rank):
            print("INJECTED", fault, flush=True)
            fail(kind or "")
        return original(*args, **kwargs)

    setattr(owner, name, failing)


if os.environ.get("FAULT"):
    inject(os.environ["FAULT"])
here = Path(__file__).resolve()
sys.argv = [sys.argv[0], "enabled", *sys.argv[1:]]
runpy.run_path(str(here.with_name("bits.py")), run_name="__main__")
