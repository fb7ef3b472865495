# SPDX-License-Identifier: Apache-2.0
"""Writes ``megatron_ttrace/jobs/released.digests``.

python -m tests.jobs.released_digests REPOSITORY FIRST..LAST 0.18.2=FOLDER 0.19.2=FOLDER

Given a repository with upstream's main branch, its commits, and the folder of each release.
"""

import functools
import hashlib
import subprocess
import sys
from collections.abc import Iterator, Set
from pathlib import Path

from megatron_ttrace.jobs import released

DATA = Path(released.__file__).with_name("released.digests")


def write(states: Iterator[tuple[str, Set[bytes]]]) -> None:
    """The digests of all states, which are given with their names."""
    names: list[str] = []
    since: dict[bytes, int] = {}
    records: list[bytes] = []
    before: Set[bytes] = frozenset()
    for number, (name, known) in enumerate(states):
        names.append(name)
        records += (released.RECORD.pack(since[it], number - 1, it) for it in before - known)
        since |= dict.fromkeys(known - before, number)
        before = known
    records += (released.RECORD.pack(since[it], len(names) - 1, it) for it in before)
    DATA.write_bytes(" ".join(names).encode() + b"\n" + b"".join(sorted(records)))


def of_folder(folder: Path) -> frozenset[bytes]:
    """The digests of a release's files and functions."""
    files = (*folder.glob("*.py"), *folder.glob("megatron/**/*.py"))
    of_files = (of_file(f.relative_to(folder).as_posix(), f.read_bytes()) for f in files)
    return frozenset().union(*of_files)


def of_commits(repository: str, commits: str) -> Iterator[tuple[str, frozenset[bytes]]]:
    """The digests of each commit that changes Python code of Megatron's, or a script beside it."""

    def git(*words: str) -> bytes:
        return subprocess.run(
            ("git", "-C", repository, *words), capture_output=True, check=True
        ).stdout

    @functools.cache
    def of_blob(name: str, blob: str) -> frozenset[bytes]:
        return of_file(name, git("cat-file", "blob", blob))

    files = (":(glob)*.py", ":(glob)megatron/**/*.py")
    listed = git("rev-list", "--first-parent", "--reverse", commits, "--", *files).decode().split()
    for commit in (commits.partition("..")[0], *listed):
        tree = git("ls-tree", "-r", "-z", commit, "--", "megatron").decode().split("\0")
        tree += git("ls-tree", "-z", commit).decode().split("\0")
        entries = (entry.partition("\t") for entry in tree if entry.endswith(".py"))
        of_files = (of_blob(name, words.split()[2]) for words, _, name in entries)
        yield git("rev-parse", commit).decode()[:12], frozenset().union(*of_files)


def of_file(name: str, source: bytes) -> frozenset[bytes]:
    """The digests of a file and of its functions."""
    texts = released.texts(source)
    whole = released.digest(name, "", hashlib.sha256(source).digest())
    return frozenset({whole, *(released.digest(name, function, text) for function, text in texts)})


def _states(repository: str, commits: str, *releases: str) -> Iterator[tuple[str, Set[bytes]]]:
    for release in releases:
        name, _, folder = release.partition("=")
        yield name, of_folder(Path(folder))
    yield from of_commits(repository, commits)


if __name__ == "__main__":
    write(_states(*sys.argv[1:]))
