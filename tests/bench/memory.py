# SPDX-License-Identifier: Apache-2.0
"""How much memory this process needs at most for a while, from Linux's ``/proc``."""

from __future__ import annotations

import dataclasses
import re
import threading
from pathlib import Path

_SECONDS = 0.01
_STATUS, _REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET = "5"
"""Sets the largest resident size to the present one (proc(5))."""


class Peak:
    """A context; afterwards bytes.

    Attributes:
        anonymous: without pages of mapped files, which the kernel can drop. Sampled.
        resident: with them. Exact.
    """

    anonymous = 0
    resident = 0

    def __enter__(self) -> Peak:
        _REFS.write_text(_RESET)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.resident = _bytes("VmHWM")

    def _watch(self) -> None:
        while not self._ended.wait(_SECONDS):
            self.anonymous = max(self.anonymous, _bytes("RssAnon") + _bytes("RssShmem"))


def _bytes(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", _STATUS.read_text(), re.M)
    return int(found[1]) * 1024 if found else 0


@dataclasses.dataclass(frozen=True)
class Turn:
    """One training step.

    Attributes:
        number: negative while warming up.
        is_dear: whether it was captured.
        seconds: that it took, without ``report``.
        report: seconds for verdicts and report.
        steps: seconds of each step of Megatron's within: of a rehearsal, then the real one.
        peak: bytes of memory at most, mapped files left out.
        resident: the same with mapped files.
    """

    number: int
    is_dear: bool
    seconds: float
    report: float
    steps: list[float]
    peak: int
    resident: int
