# SPDX-License-Identifier: Apache-2.0
"""Run a program that cannot change anything outside of itself, by a filter in the kernel.

Every system call that is not listed here fails, in the program and in all that it starts: no file
is created, changed or removed, no process is signalled, nothing is sent. Each file to be opened and
each program to be started is a request to this process (seccomp_unotify(2), Linux 5.9). The filter
is inherited and cannot be removed (seccomp(2)), so this depends neither on PATH nor on what a
script does.

Run as a script between ``fork`` and the program: ``python -I -S guard.py SOCKET PROGRAM ARGS``.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import dataclasses
import errno
import fcntl
import os
import platform
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Self

_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""The kernel's name of an architecture (linux/audit.h), and its column below."""
_CALLS = {
    line.split()[0]: tuple(None if word == "-" else int(word) for word in line.split()[1:])
    for line in """\
read 0 63|write 1 64|close 3 57|fstat 5 80|lseek 8 62|mmap 9 222|mprotect 10 226|munmap 11 215
brk 12 214|rt_sigaction 13 134|rt_sigprocmask 14 135|rt_sigreturn 15 139|rt_sigsuspend 130 133
rt_sigpending 127 136|rt_sigtimedwait 128 137|pread64 17 67|readv 19 65|writev 20 66|access 21 -
pipe 22 -|select 23 -|mremap 25 216|madvise 28 233|mincore 27 232|dup 32 23|dup2 33 -|pause 34 -
nanosleep 35 101|getitimer 36 102|alarm 37 -|setitimer 38 103|getpid 39 172|fork 57 -|vfork 58 -
exit 60 93|wait4 61 260|uname 63 160|getcwd 79 17|chdir 80 49|fchdir 81 50|getdents64 217 61
getdents 78 -|readlink 89 -|umask 95 166|gettimeofday 96 169|getrlimit 97 163|setrlimit 160 164
getrusage 98 165|sysinfo 99 179|times 100 153|getuid 102 174|getgid 104 176|geteuid 107 175
getegid 108 177|getppid 110 173|getpgrp 111 -|getpgid 121 155|getsid 124 156|getgroups 115 158
getresuid 118 148|getresgid 120 150|sigaltstack 131 132|stat 4 -|lstat 6 -|poll 7 -|statfs 137 43
fstatfs 138 44|arch_prctl 158 -|time 201 -|futex 202 98|sched_getaffinity 204 123
sched_yield 24 124|set_tid_address 218 96|restart_syscall 219 128|fadvise64 221 223
clock_gettime 228 113|clock_getres 229 114|clock_nanosleep 230 115|exit_group 231 94|waitid 247 95
newfstatat 262 79|readlinkat 267 78|faccessat 269 48|faccessat2 439 439|pselect6 270 72|ppoll 271 73
set_robust_list 273 99|dup3 292 24|pipe2 293 59|getrandom 318 278|rseq 334 293|statx 332 291
getcpu 309 168|capget 125 90|gettid 186 178|sendmsg 46 211|getpriority 140 141|execve 59 221
open 2 -|openat 257 56|ioctl 16 29|fcntl 72 25|prctl 157 167|clone 56 220|prlimit64 302 261
kill 62 129|tkill 200 130|tgkill 234 131|setpgid 109 154|flock 73 32|fsync 74 82|fdatasync 75 83
unlink 87 -|unlinkat 263 35|seccomp 317 277""".replace("|", "\n").splitlines()
}
"""System calls with their numbers (asm/unistd_64.h, asm-generic/unistd.h). ``sendmsg`` hands over
the filter's descriptor: without ``socket``, which is not here, nothing else can use it."""
_DECIDED = ("execve", "open", "openat")
_NOTHING = tuple("kill tkill tgkill setpgid flock fsync fdatasync unlink unlinkat".split())
"""Succeed without an effect."""
_CHOSEN = {
    "ioctl": (1, (0x5401, 0x5413, 0x541B, 0x540F), errno.ENOTTY),  # is it a terminal, how large
    "fcntl": (1, (0, 1, 2, 3, 4, 1030), errno.EINVAL),  # duplicate, flags
    "prctl": (0, (15, 16), errno.EINVAL),  # a thread's name
    "prlimit64": (0, (0,), errno.EPERM),  # of the process itself
}
"""Allowed with some values of an argument: its index, the values, and the error of all others."""
_NAMESPACES = 0x7E02A000
"""Flags of ``clone``: namespaces, another parent, a tracer."""
_ALLOW, _ERROR, _NOTIFY, _KILL = 0x7FFF0000, 0x00050000, 0x7FC00000, 0x80000000
_LOAD, _EQUAL, _ANY, _RETURN = 0x20, 0x15, 0x45, 0x06
_RECEIVE, _ANSWER, _PASS = 0xC0502100, 0xC0182101, 0x40182103
_CONTINUE = 1
_LARGEST, _SECONDS = 64 << 20, 60
"""Bytes of a file of ours that the program writes; of a processor's time, for each process."""


class GuardError(Exception):
    """This machine cannot guard a program."""


def _filter(machine: str) -> bytes:
    """The filter's program (linux/filter.h, linux/seccomp.h)."""
    audit, column = _MACHINES[machine]
    code: list[tuple[int, int, int, int]] = []

    def either(kind: int, value: int, verdict: int) -> None:
        code.extend([(kind, 0, 1, value), (_RETURN, 0, 0, verdict)])

    code += [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, audit), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    for name, numbers in _CALLS.items():
        number = numbers[column]
        if number is None or name == "seccomp":
            continue
        if name in _CHOSEN:
            index, values, error = _CHOSEN[name]
            code += [(_EQUAL, 0, 2 * len(values) + 2, number), (_LOAD, 0, 0, 16 + 8 * index)]
            for value in values:
                either(_EQUAL, value, _ALLOW)
            code.append((_RETURN, 0, 0, _ERROR | error))
        elif name == "clone":
            code += [(_EQUAL, 0, 4, number), (_LOAD, 0, 0, 16)]
            either(_ANY, _NAMESPACES, _ERROR | errno.EPERM)
            code.append((_RETURN, 0, 0, _ALLOW))
        elif name in _DECIDED:
            either(_EQUAL, number, _NOTIFY)
        else:
            either(_EQUAL, number, _ERROR if name in _NOTHING else _ALLOW)
    code.append((_RETURN, 0, 0, _ERROR | errno.ENOSYS))
    return b"".join(struct.pack("=HBBI", *line) for line in code)


def _install() -> int:
    """Put the filter on this process, for good; the descriptor that receives its requests.

    Raises ``OSError`` when the kernel does not do that.
    """
    machine = platform.machine()
    libc = ctypes.CDLL(None, use_errno=True)
    code = _filter(machine)
    program = ctypes.create_string_buffer(code)
    header = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(program))
    if libc.prctl(38, 1, 0, 0, 0):  # PR_SET_NO_NEW_PRIVS
        raise OSError(ctypes.get_errno(), "no_new_privs")
    number = _CALLS["seccomp"][_MACHINES[machine][1]]
    listener = int(libc.syscall(number, 1, 8, header))  # SET_MODE_FILTER, NEW_LISTENER
    if listener < 0:
        raise OSError(ctypes.get_errno(), "seccomp")
    return listener


@dataclasses.dataclass(frozen=True)
class Request:
    """A file to be opened or a program to be started; it waits until one method is called.

    ``path`` is made absolute; ``flags`` are those of ``open``, ``None`` for a program, which has
    ``words``, the first one as it was given, and an environment.
    """

    process: int
    path: str
    flags: int | None
    words: tuple[str, ...]
    environment: Mapping[str, str]
    _guard: Guarded
    _id: int

    def allow(self) -> None:
        """Let the kernel do it."""
        self._guard.answer(self._id, 0, 0, _CONTINUE)

    def refuse(self, error: int) -> None:
        """Fail with ``error``."""
        self._guard.answer(self._id, 0, -error, 0)

    def give(self, descriptor: int) -> None:
        """Open ``descriptor`` instead, which stays ours to close."""
        keep = (self.flags or 0) & os.O_CLOEXEC
        # Mutable: `ioctl` returns the number in the process for that only.
        passed = bytearray(struct.pack("=QIIII", self._id, 0, descriptor, 0, keep))
        try:
            number = fcntl.ioctl(self._guard.listener, _PASS, passed)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOTTY):
                raise GuardError("its kernel passes no descriptors") from error
            self.refuse(errno.EACCES)  # it was interrupted, and asks again
            return
        self._guard.answer(self._id, number, 0, 0)


class Guarded:
    """A program that runs behind the filter, as a context; at its end all its processes are killed.

    Raises ``GuardError`` when this machine cannot guard a program.
    """

    def __init__(
        self,
        words: Sequence[str],
        directory: str | None,
        environment: Mapping[str, str],
        output: IO[bytes],
        errors: IO[bytes],
    ) -> None:
        """Start it: without input, its output in two files of ours."""
        if sys.platform != "linux" or platform.machine() not in _MACHINES:
            raise GuardError(f"{platform.system()} on {platform.machine()}")
        self.listener = -1
        mine, theirs = socket.socketpair()
        with mine, theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(theirs.fileno()), *words],
                cwd=directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
            theirs.close()
            message, descriptors, *_ = socket.recv_fds(mine, 200, 1)
        if not descriptors:
            self.__exit__()
            raise GuardError(message.decode(errors="replace") or "the guard did not start")
        self.listener = descriptors[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # None of them can leave the group: setsid and setpgid do nothing.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        if self.listener >= 0:
            os.close(self.listener)
        self._process.wait()

    def requests(self, seconds: float) -> Iterator[Request]:
        """What it asks for, until all its processes have ended.

        Raises ``TimeoutError`` after ``seconds``.
        """
        poll = select.poll()
        poll.register(self.listener, select.POLLIN)
        end = time.monotonic() + seconds
        while (remaining := end - time.monotonic()) > 0:
            for _, event in poll.poll(remaining * 1000):
                if not event & select.POLLIN:
                    return
                request = self._receive()
                if request is not None:
                    yield request
        raise TimeoutError

    def _receive(self) -> Request | None:
        buffer = bytearray(80)
        try:
            fcntl.ioctl(self.listener, _RECEIVE, buffer)
        except OSError:
            return None  # interrupted: it asks again, or has ended
        number, process, _, call, _, _, *arguments = struct.unpack("=QIIiIQ6Q", buffer)
        name = next(
            name for name in _DECIDED if _CALLS[name][_MACHINES[platform.machine()][1]] == call
        )
        try:
            with open(f"/proc/{process}/mem", "rb", buffering=0) as memory:
                at = arguments[0] if name != "openat" else arguments[1]
                path = _text(memory, at)
                words = _texts(memory, arguments[1]) if name == "execve" else ()
                variables = _texts(memory, arguments[2]) if name == "execve" else ()
            folder = struct.unpack("=i", struct.pack("=I", arguments[0] & 0xFFFFFFFF))[0]
            within = "cwd" if name != "openat" or folder == -100 else f"fd/{folder}"
            # Without the last part's link: `/dev/fd/0` is of the process that asks.
            path = os.path.join(os.readlink(f"/proc/{process}/{within}"), path)
        except OSError:
            self.answer(number, 0, -errno.EACCES, 0)
            return None
        flags = None if name == "execve" else arguments[1 + (name == "openat")] & 0xFFFFFFFF
        pairs = (word.partition("=")[::2] for word in variables)
        return Request(
            process=process,
            path=path,
            flags=flags,
            words=words,
            environment=dict(pairs),
            _guard=self,
            _id=number,
        )

    def answer(self, number: int, value: int, error: int, flags: int) -> None:
        """Send the kernel an answer; a process that was killed meanwhile needs none."""
        with contextlib.suppress(OSError):
            fcntl.ioctl(self.listener, _ANSWER, struct.pack("=QqiI", number, value, error, flags))


def _text(memory: IO[bytes], at: int) -> str:
    """A text that ends with a zero byte."""
    content = b""
    while b"\0" not in content:
        memory.seek(at + len(content))
        content += memory.read(4096 - (at + len(content)) % 4096)
    return os.fsdecode(content.partition(b"\0")[0])


def _texts(memory: IO[bytes], at: int) -> tuple[str, ...]:
    """The texts to which an array of addresses points that ends with a zero."""
    texts: list[str] = []
    while at:
        memory.seek(at + 8 * len(texts))
        address = array.array("Q", memory.read(8))[0]
        if not address:
            break
        texts.append(_text(memory, address))
    return tuple(texts)


def _main() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, int(sys.argv[1])) as parent:
        program = sys.argv[2:]
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # Should the process that decides die, none goes on for long.
        resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS))
        resource.setrlimit(resource.RLIMIT_FSIZE, (_LARGEST, _LARGEST))
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        try:
            listener = _install()
        except (OSError, AttributeError) as error:
            parent.sendall(str(error).encode())
            sys.exit(2)
        socket.send_fds(parent, [b"\0"], [listener])
        os.close(listener)
    os.execvp(program[0], program)  # noqa: S606


if __name__ == "__main__":
    _main()
