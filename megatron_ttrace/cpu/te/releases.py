# SPDX-License-Identifier: Apache-2.0
"""Which release of TransformerEngine is emulated.

By default the one that the Megatron release was built with; another if ``TTRACE_TE_VERSION`` asks
for it. What the releases do differently is in ``differences.py``.
"""

import importlib.util
import os
import re
from pathlib import Path
from typing import NamedTuple

from megatron_ttrace.errors import TTraceError

#: Environment variable that names a release: ``2.10`` or ``2.14.1``.
VARIABLE = "TTRACE_TE_VERSION"


class Release(NamedTuple):
    """A release of TransformerEngine; releases are ordered."""

    major: int
    minor: int
    patch: int = 0

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"


#: All releases from the oldest that can be emulated to the newest. Before 2.3 Megatron looks for
#: attention and rotary embeddings in other modules.
KNOWN = (
    *(Release(2, minor) for minor in range(3, 15)),
    *(Release(2, 14, 1), Release(2, 15), Release(2, 16), Release(2, 16, 1), Release(2, 17)),
    *(Release(2, 17, 1), Release(2, 18)),
)

#: Series of Megatron, and the release that it was built with: ``transformer-engine`` under
#: ``tool.uv.sources`` in Megatron's pyproject.toml (its uv.lock has the version).
PINNED = {
    # core_v0.17.1, pyproject.toml:205: 366798ef, the tag v2.14.1.
    "0.17": Release(2, 14, 1),
    # core_v0.18.2, pyproject.toml:206: b9d690e0, nine commits after v2.16; calls itself 2.16.0.
    "0.18": Release(2, 16),
    # core_v0.19.0, pyproject.toml:234: 4329ff84, the tag v2.17.1.
    "0.19": Release(2, 17, 1),
    # main at d98e8a64, pyproject.toml:246: the same as 0.19.
    "0.20": Release(2, 17, 1),
}

_current = PINNED["0.19"]


def current() -> Release:
    """Return the release that is emulated."""
    return _current


def use(release: Release) -> None:
    """Emulate ``release`` from now on."""
    global _current
    _current = release


def wanted() -> Release:
    """Return the release to emulate: the one asked for, else the one of the Megatron that is there.

    Raises:
        TTraceError: when the one asked for is none that can be emulated.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if text:
        return parsed(text)
    return PINNED.get(_megatron_series(), _current)


def parsed(text: str) -> Release:
    """Return the release of that name.

    Raises:
        TTraceError: when there is none, or none that can be emulated.
    """
    for release in KNOWN:
        if text in (str(release), str(release).removesuffix(".0")):
            return release
    known = ", ".join(str(release).removesuffix(".0") for release in KNOWN)
    raise TTraceError(
        f"{VARIABLE}={text} is not a release of TransformerEngine that can be emulated: "
        f"use one of {known}"
    )


def _megatron_series() -> str:
    """``0.19`` for the Megatron that would be imported; nothing of it is imported."""
    try:
        found = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        found = None
    if found is None or found.origin is None:
        return ""
    try:
        text = Path(found.origin).with_name("package_info.py").read_text(encoding="utf-8")
    except OSError:
        return ""
    parts = [re.search(rf"^{name} *= *([0-9]+)", text, re.MULTILINE) for name in ("MAJOR", "MINOR")]
    return ".".join(part[1] for part in parts if part)
