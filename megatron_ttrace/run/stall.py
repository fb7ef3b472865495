# SPDX-License-Identifier: Apache-2.0
"""A thread that notices when ranks make no progress, and names the collectives that they wait in.

In training it prints one line. A check that can never end (``trace/waits.py``) ends with that line.
"""

import os
import sys
import threading
import time
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_ttrace.capture import waiting
from megatron_ttrace.mcore.names import Names
from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.run.agreement import Ranks
from megatron_ttrace.trace import aborts, ends, waits
from megatron_ttrace.trace.errors import ExitCode
from megatron_ttrace.trace.waits import Doing

SECONDS = 30.0
"""Without progress, after which a rank writes where it waits."""
_LOOKS = 6
"""Per that time."""


class Watchdog:
    """Watches this rank, and on rank 0 what all ranks have written."""

    def __init__(self, folder: Path, rank: int, size: int, *, ends_check: bool) -> None:
        """Start watching. All ranks write where they wait into the folder.

        ``ends_check``: whether a check that never ends is ended.
        """
        self._modules: Mapping[Any, str] = {}
        self._mesh: Mesh | None = None
        self._folder, self._rank, self._size = folder, rank, size
        self._ends_check = ends_check
        self._over = threading.Event()
        self._place: Hashable = None
        self._since = time.monotonic()
        self._left: waits.Wait | None = None
        self._last_text = ""
        self._judged = False
        if rank == 0:
            waits.forget(folder)
        threading.Thread(target=self._run, daemon=True).start()
        self._unguard = aborts.before(self._aborted, SECONDS / 2)

    def knows(self, chunks: Iterable[Names], mesh: Mesh) -> None:
        """From now on modules and groups have names."""
        self._modules = {module: name for names in chunks for name, module in names.modules.items()}
        self._mesh = mesh

    def stop(self) -> None:
        """The check is over."""
        self._over.set()
        self._unguard()

    def _run(self) -> None:
        try:
            while not self._over.wait(SECONDS / _LOOKS):
                self._look()
        except Exception as error:  # noqa: BLE001 - watching never harms training
            print(f"ttrace: stalls are not watched any more: {error!r}"[:300], flush=True)
        finally:
            waits.write(self._folder, self._rank, None)

    def _aborted(self) -> None:
        """This process ends, perhaps by what the communication library sees: name all ranks'."""
        _, wait = waiting.state(Ranks.waiting_code(), self._modules, self._mesh)
        if wait is None or wait.doing not in (Doing.COLLECTIVE, Doing.HANDLE):
            return
        waits.write(self._folder, self._rank, wait)
        waits.ask(self._folder)
        until = time.monotonic() + 2 * SECONDS / _LOOKS
        while len(self._waits()) < self._size and time.monotonic() < until:
            time.sleep(0.1)
        stall = waits.judge(self._waits(), self._size)
        why = f", {stall.mismatch}" if stall.mismatch else ""
        ends.tell(f"rank {self._rank} was aborted in a collective{why}: {stall.text}")

    def _waits(self) -> dict[int, waits.Wait]:
        """Where ranks wait, as far as they have written it."""
        ranks = range(self._size)
        return {rank: wait for rank in ranks if (wait := waits.read(self._folder, rank))}

    def _look(self) -> None:
        place, wait = waiting.state(Ranks.waiting_code(), self._modules, self._mesh)
        now = time.monotonic()
        if wait is not None and waits.is_asked(self._folder):
            self._left = wait
            waits.write(self._folder, self._rank, wait)
            return
        if place != self._place or wait is None:
            self._place, self._since = place, now
            if self._left is not None:
                waits.write(self._folder, self._rank, None)
            self._left = None
            return
        if now - self._since < SECONDS:
            return
        if self._left is None:
            self._left = wait
            waits.write(self._folder, self._rank, wait)
        if self._rank == 0:
            self._judge(now - self._since)
        elif self._ends_check:
            first = waits.read(self._folder, 0)
            if first is not None and first.doing is Doing.ENDED:
                self._end("rank 0 ended the check", follows=True)

    def _judge(self, seconds: float) -> None:
        by_rank = self._waits()
        stall = waits.judge(by_rank, self._size)
        if all(wait.doing is Doing.MEETING for wait in by_rank.values()):
            return  # which prints what it waits for
        is_new, self._last_text = stall.text != self._last_text, stall.text
        if is_new:
            # What ranks wrote may be some seconds old: it counts when it is seen again.
            print(f"ttrace: no progress for {seconds:.0f} s: {stall.text}", flush=True)
        if is_new or stall.mismatch is None or self._judged:
            return
        self._judged = True
        line = f"the ranks wait for each other forever, {stall.mismatch}: {stall.text}"
        if self._ends_check and not self._over.is_set():
            waits.write(self._folder, 0, waits.Wait(doing=Doing.ENDED))
            self._end(line, follows=False)
        print(f"ttrace: {line}", flush=True)

    def _end(self, line: str, *, follows: bool) -> None:
        code = int(ExitCode.COULD_NOT_CHECK)
        if follows:
            ends.write(ends.EndRecord(code=code, at=0, message=line, follows=True))
        else:
            ends.tell(line, code)
        sys.stdout.flush()
        os._exit(code)
