# SPDX-License-Identifier: Apache-2.0
"""Writes ``megatron_ttrace/jobs/released.digests``, given the folder of each release.

python -m tests.jobs.released_digests 0.18.2=FOLDER 0.19.2=FOLDER 0.20.0=FOLDER
"""

import hashlib
import sys
from collections import defaultdict
from pathlib import Path

from megatron_ttrace.jobs import released
from megatron_ttrace.mcore import versions

DATA = Path(released.__file__).with_name("released.digests")


def write(folders: dict[str, Path]) -> None:
    """The digests of all files and functions."""
    releases: dict[bytes, int] = defaultdict(int)
    for release, folder in folders.items():
        bit = 1 << versions.KNOWN.index(release)
        for file in (*folder.glob("*.py"), *folder.glob("megatron/**/*.py")):
            name, source = file.relative_to(folder).as_posix(), file.read_bytes()
            releases[released.digest(name, "", hashlib.sha256(source).digest())] |= bit
            for function, text in released.texts(source):
                releases[released.digest(name, function, text)] |= bit
    DATA.write_bytes(b"".join(bytes([releases[it]]) + it for it in sorted(releases)))


if __name__ == "__main__":
    write({name: Path(folder) for name, _, folder in (it.partition("=") for it in sys.argv[1:])})
