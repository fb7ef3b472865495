# SPDX-License-Identifier: Apache-2.0
"""Newer patch releases of megatron-core on the package index that pip is configured for.

Nothing else in this package uses a network. Only ``ttrace doctor --online`` and a nightly test ask.
"""

import contextlib
import json
import re
import subprocess
import sys

from megatron_ttrace.mcore.versions import MAIN, SUPPORTED, series
from megatron_ttrace.trace.errors import TTraceError

_SECONDS = 60
_ASK = (
    "install --dry-run --no-deps --ignore-installed --only-binary :all: --quiet --report -"
).split()


def newer_patches() -> dict[str, str]:
    """Supported versions, and the newer release of their series where the index has one.

    A release of the series of Megatron-LM's main is newer than what was tried of main.

    Raises:
        TTraceError: without pip, or when the index cannot be reached.
    """
    found = {version: _newest(version) for version in SUPPORTED}
    newer = {
        version: newest for version, newest in found.items() if _numbers(newest) > _numbers(version)
    }
    # That of main fails until there is one; the index answered the questions before.
    with contextlib.suppress(TTraceError):
        newer[MAIN] = _newest(MAIN)
    return newer


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


def _newest(version: str) -> str:
    """The newest release of a version's series that pip would install on this machine.

    pip skips pre-releases and yanked releases, and installs nothing with ``--dry-run``.
    """
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *_ASK]
    wanted = f"megatron-core=={series(version)}.*"
    try:
        done = subprocess.run(
            [*command, wanted], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise TTraceError(f"pip did not answer within {_SECONDS} s") from error
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise TTraceError(f"pip cannot list megatron-core: {reason}")
    return str(json.loads(done.stdout)["install"][0]["metadata"]["version"])
