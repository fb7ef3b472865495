# SPDX-License-Identifier: Apache-2.0
"""Lines of progress on standard error."""

from __future__ import annotations

import sys
import time


class Progress:
    """Called with a line, prints it with the seconds since this object was made."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since this object was made."""
        return time.monotonic() - self._began

    def __call__(self, line: str) -> None:
        """Print a line."""
        print(f"[{self.seconds:6.1f} s] {line}", file=sys.stderr, flush=True)
