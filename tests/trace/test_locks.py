# SPDX-License-Identifier: Apache-2.0
"""Locks belong to one process, and end with it."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_ttrace.trace.locks import Lock


def is_free(path: Path) -> bool:
    """Whether somebody else could take a lock, who gives it back at once."""
    lock = Lock(path)
    taken = lock.acquire()
    lock.release()
    return taken


def test_one_holder(tmp_path: Path) -> None:
    """A second one waits until the first gives it back; the holder is named."""
    first, second = Lock(tmp_path / "l"), Lock(tmp_path / "l")
    assert second.holder() == "another process"
    assert first.acquire()
    first.sign()
    assert not second.acquire()
    assert second.holder().startswith(f"process {os.getpid()} on ")
    first.release()
    first.release()
    assert is_free(tmp_path / "l")


def test_shared_holders(tmp_path: Path) -> None:
    """Several share; none alone has it."""
    ranks = [Lock(tmp_path / "l") for _ in range(3)]
    assert all(rank.acquire(shared=True) for rank in ranks)
    assert not is_free(tmp_path / "l")
    for rank in ranks:
        rank.release()
    assert is_free(tmp_path / "l")


def test_a_forked_child_neither_keeps_nor_releases_it(tmp_path: Path) -> None:
    """It closes its copy: the parent's lock stays, and ends with the parent's own."""
    lock = Lock(tmp_path / "l")
    assert lock.acquire()
    ready, begun = os.pipe()
    child = os.fork()
    if not child:
        lock.release()  # what a child does with its copy is nothing
        os.write(begun, b".")
        time.sleep(60)
        os._exit(0)
    try:
        assert os.read(ready, 1) == b"."
        assert not is_free(tmp_path / "l")
        lock.release()
        assert is_free(tmp_path / "l")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(begun)


def test_a_killed_holder(tmp_path: Path) -> None:
    """The kernel gives the lock back, though a program that the holder started lives on."""
    code = (
        "import subprocess, sys, time\nfrom pathlib import Path\n"
        "from megatron_ttrace.trace.locks import Lock\n"
        f"assert Lock(Path({str(tmp_path / 'l')!r})).acquire()\n"
        "child = subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL)\n"
        "print(child.pid, flush=True)\ntime.sleep(60)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    sleeper = int(holder.stdout.readline())
    try:
        assert not is_free(tmp_path / "l")
        holder.kill()
        holder.wait()
        assert is_free(tmp_path / "l")
    finally:
        os.kill(sleeper, signal.SIGKILL)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"pid": "x"}', "[" * 9999])
def test_a_note_of_noise(tmp_path: Path, text: str) -> None:
    """Whatever is in the file, there are words for its holder."""
    (tmp_path / "l").write_text(text)
    assert Lock(tmp_path / "l").holder() == "another process"


def test_a_hostile_note(tmp_path: Path) -> None:
    """Nothing in it reaches the terminal as a control character."""
    (tmp_path / "l").write_text('{"pid": 1, "host": "\\u001b[2J", "date": "\\n"}')
    assert Lock(tmp_path / "l").holder().isprintable()


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then everybody gets the lock, and can know that it means nothing."""

    def unsupported(handle: int, how: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    first, second = Lock(tmp_path / "l"), Lock(tmp_path / "l")
    assert first.acquire()
    assert second.acquire()
    assert not first.supported
    first.release()
    second.release()
