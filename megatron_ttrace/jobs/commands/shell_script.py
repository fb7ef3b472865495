# SPDX-License-Identifier: Apache-2.0
"""The training command that a shell script would start.

Only a shell knows a script's arrays, conditions and defaults, so ``bash`` runs it, where the kernel
lets it change nothing (``guard.py``): it sees its own writes, and nobody else does. Programs that
only read are run. All others are recorded instead, and succeed without output. Where the training
command depends on what such a program would have printed, it is not known, and refused.
"""

import contextlib
import dataclasses
import errno
import json
import os
import re
import shlex
import shutil
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from megatron_ttrace.jobs.commands import command_line
from megatron_ttrace.jobs.commands.command_line import EXAMPLE, Command, ShellScript
from megatron_ttrace.jobs.commands.guard import Guarded, GuardError, Request
from megatron_ttrace.trace.errors import TTraceError

_SECONDS = 20
_READERS = frozenset(
    "[ arch awk basename bc cat comm cut date diff dirname du echo egrep env expr false fgrep file "
    "find fold free gawk getconf getent git grep head hostname id join jq ls lscpu mawk md5sum nl "
    "nproc numfmt od paste printenv printf pwd readlink realpath rev sed seq sha256sum shuf sort "
    "stat tac tail test tr true tty uname uniq wc which whoami xargs".split()
)
"""Programs that are run: behind the guard they can only read, and what they start is recorded."""
_TOOLS = frozenset(
    "aws chgrp chmod chown cp curl dos2unix gcloud gsutil gzip install ln mkdir mv pip pip3 pkill "
    "rm rmdir rsync scp shred sleep tar tee touch truncate unlink unzip wget zip".split()
)
"""Programs whose arguments may be scripts that they do not run."""
_SHELLS = ("sh", "dash", "ksh")
_KEEP_CONTENT = ("chgrp", "chmod", "chown", "ln", "mkdir", "sleep", "touch")
"""Programs after which the files that they name contain what they did before."""
_SET_UP = frozenset("conda lmod mamba micromamba modulecmd modulecmd.tcl pyenv spack".split())
"""Programs that print commands which prepare an environment, and choose nothing of the job."""
_UNFOUND = "/ttrace-not-found/"
_VARIABLES = ("CUDA", "NCCL", "NVTE", "TORCH", "PYTORCH", "CUBLAS", "PYTHON")
"""Prefixes of what a script sets for the training, apart from what it sets for itself."""
_MARK = 7919
"""What the first program that is not run prints, if it prints something; others print the next."""
_NOTHING, _ONE_LINE, _TWO_LINES = ":", "echo {mark}", r"printf '{mark}\n{mark}\n'"
_HANDLE = {
    "BASH_FUNC_command_not_found_handle%%": f'() {{ "{_UNFOUND}$1" "${{@:2}}"; }}',
}
"""Makes bash start programs that PATH lacks, so that they are seen."""
_TASKS = "TTRACE_TASKS"
"""A variable with how many processes run the script that has it."""
_PIPE = re.compile(r"/(?:dev|proc/self)/fd/(\d+)|/dev/stdin")
_QUOTED = re.compile(r": line \d+: `.*'$")
"""The line of a script that bash prints after a syntax error."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_LARGEST = 16 << 20
"""Bytes of a file to which a script adds something."""


def resolve(script: ShellScript, directory: Path | None = None) -> Command:
    """Read what a script would start in ``directory`` (by default here), without starting it.

    Raises ``TTraceError`` when it does not exist, fails, starts no training script, or when its
    training command depends on a program that is not run.
    """
    if not Path(directory or "", script.folder).is_dir():
        script = dataclasses.replace(script, folder="")
    path = Path(script.folder, script.words[0])
    if not Path(directory or "", path).is_file():
        raise TTraceError(f"{path}: no such script")
    shell = shutil.which("bash")
    interpreter = _interpreter(path)
    if interpreter not in ("", "bash", *_SHELLS) or shell is None:
        raise TTraceError(
            f"{path} is a script for {interpreter or 'bash'}, which cannot be read here: "
            f"give the command that it starts, e.g. {EXAMPLE}"
        )

    def read(reply: str) -> _Reading:
        return _Reading(script, shell, directory, reply)

    first = read(_NOTHING)
    command = first.command
    # Only what the programs that are not run would have answered differs.
    for reply in (_TWO_LINES, "exit 1") if first.not_run else ():
        other = read(reply)
        name = other.obeyed
        if other.command is not None and other.command != command:
            # Times and random numbers differ in any two readings.
            again = read(_NOTHING).command
            noise = _differing(command, again) if command and again else ()
            if command is None or _without(command, noise) != _without(other.command, noise):
                name = name or other.source(other.command)
        if name:
            raise TTraceError(
                f"the training command of {path} depends on {name}, but scripts are read, not "
                f"run: give the command itself, e.g. {EXAMPLE}"
            )
    if command is None:
        raise TTraceError(f"{path} does not start a Megatron training script{first.why()}")
    return command


def _differing(first: Command, second: Command) -> tuple[int, ...]:
    pairs = zip(first.arguments, second.arguments, strict=False)
    return tuple(place for place, (a, b) in enumerate(pairs) if a != b)


def _without(command: Command, noise: tuple[int, ...]) -> Command:
    """A command with nothing in place of the arguments at these places."""
    words = ("" if at in noise else word for at, word in enumerate(command.arguments))
    return dataclasses.replace(command, arguments=tuple(words))


def _interpreter(path: Path) -> str:
    """The program that the first line of a file names, if there is such a line."""
    try:
        with path.open("rb") as file:
            first = file.readline(200)
    except OSError:
        return ""
    words = first[2:].decode(errors="replace").split() if first.startswith(b"#!") else []
    names = [os.path.basename(word) for word in words if not word.startswith("-")]
    return (names[1] if names[:1] == ["env"] and names[1:] else names[0]) if names else ""


def _link(process: int, name: str) -> str:
    """Where a link of Linux's ``/proc`` leads; empty if the process has ended."""
    try:
        return os.readlink(f"/proc/{process}/{name}")
    except OSError:
        return ""


def _tasks(variables: Mapping[str, str]) -> dict[str, int]:
    return dict(json.loads(variables.get(_TASKS, "{}")))


class _Reading:
    """One run of a script behind the guard, up to its training command.

    Attributes:
        command: the training command.
        not_run: what was not run, by what it printed.
        obeyed: of these, the program whose output was run as a command.
    """

    def __init__(self, script: ShellScript, shell: str, directory: Path | None, reply: str) -> None:
        self.command: Command | None = None
        self.not_run: dict[str, str] = {}
        self.obeyed = ""
        self._script, self._shell, self._reply = script, shell, reply
        self._directory = os.path.join(directory or "", script.folder) or os.curdir
        self._refused = ""
        self._started = False
        self._replies: dict[int, tuple[str, str]] = {}
        self._written: dict[str, str] = {}
        self._changed: dict[str, str] = {}
        self._calls: dict[str, list[str]] = {}
        with (
            tempfile.TemporaryDirectory(prefix="ttrace-") as folder,
            tempfile.TemporaryFile() as output,
            tempfile.TemporaryFile() as errors,
        ):
            self._folder = folder
            self._run(output, errors)
            self._last = ""
            for file in (errors, output):
                file.seek(0)
                lines = file.read(1 << 20).decode(errors="replace").split("\n")
                texts = [line.strip() for line in lines if line.strip()]
                if len(texts) > 1 and _QUOTED.search(texts[-1]):
                    del texts[-1]
                self._last = self._last or (texts[-1] if texts else "")

    def _run(self, output: IO[bytes], errors: IO[bytes]) -> None:
        words = [self._shell, "--", *self._script.words]
        environment = {**os.environ, **self._script.environment, **_HANDLE}
        environment[_TASKS] = json.dumps(dict(self._script.tasks))
        try:
            with Guarded(words, self._directory, environment, output, errors) as guarded:
                for request in guarded.requests(_SECONDS):
                    if request.flags is not None:
                        self._open(request, request.flags)
                    elif self._start(request):
                        break
        except TimeoutError:
            self._refused = f"it did not come to one within {_SECONDS} s"
        except OSError as error:
            raise TTraceError(
                f"{self._script.words[0]} cannot be read: {error.strerror or error}"
            ) from error
        except GuardError as error:
            raise TTraceError(
                f"a script cannot be read safely on this machine ({error}; it needs Linux 5.9): "
                f"give the command that {self._script.words[0]} starts, e.g. {EXAMPLE}"
            ) from error

    def why(self) -> str:
        """Why there is no command, after a colon."""
        names = ", ".join(sorted(set(self.not_run.values()))[:5])
        text = self._refused or self._last or (names and f"all that it starts is {names}")
        return f": {text}" if text else ""

    def source(self, command: Command) -> str:
        """The programs that a command depends on, as far as its words show that."""
        words = " ".join([*command.arguments, *command.environment.values(), str(command.ranks)])
        names = {name for mark, name in self.not_run.items() if mark in words}
        return " or ".join(sorted(names or set(self.not_run.values()))[:3])

    def _open(self, request: Request, flags: int) -> None:
        """Give what a process may read; what it writes is a file of ours, which it can read."""
        path, text = self._replies.get(request.process, ("", ""))
        if request.path == path:
            file = self._new_file()
            Path(file).write_text(text, encoding="utf-8", errors="surrogateescape")
            self._give(request, file, os.O_RDONLY)
            return
        writes = flags & (os.O_ACCMODE | os.O_CREAT | os.O_TRUNC)
        if writes and request.path.startswith(("/dev/", "/proc/")):
            self._give_stream(request)
            return
        path = os.path.realpath(request.path)
        if writes and path not in self._written:
            self._written[path] = self._new_file()
            if not flags & os.O_TRUNC and os.path.isfile(path):
                with open(path, "rb") as old, open(self._written[path], "wb") as new:
                    new.write(old.read(_LARGEST))
        if path in self._written:
            keep = os.O_ACCMODE | os.O_APPEND | os.O_TRUNC
            self._give(request, self._written[path], flags & keep | os.O_CREAT)
            return
        self._check(path)
        try:
            kind = stat.S_IFMT(os.stat(path).st_mode)
        except OSError:
            kind = stat.S_IFREG  # the kernel says what is wrong
        # Nothing waits for another program, and no device is woken.
        if (
            kind in (stat.S_IFREG, stat.S_IFDIR)
            or path in _DEVICES
            or _PIPE.fullmatch(request.path)
        ):
            request.allow()
        else:
            request.refuse(errno.EACCES)

    def _check(self, path: str) -> None:
        """Refuse to read a file that a program would have changed that was not run."""
        places = [path, *map(str, Path(path).parents)] if not os.path.exists(path) else [path]
        for place in places:
            if place in self._changed:
                raise TTraceError(
                    f"{self._script.words[0]} reads {path} after {self._changed[place]}, but "
                    f"scripts are read, not run: give the command itself, e.g. {EXAMPLE}"
                )

    def _new_file(self) -> str:
        descriptor, name = tempfile.mkstemp(dir=self._folder)
        os.close(descriptor)
        return name

    def _give(self, request: Request, path: str, flags: int) -> None:
        descriptor = os.open(path, flags)
        try:
            request.give(descriptor)
        finally:
            os.close(descriptor)

    def _give_stream(self, request: Request) -> None:
        """A pipe that the process has by its number; instead of all other devices, none."""
        path = os.devnull
        match = _PIPE.fullmatch(request.path)
        if match is not None and match[1]:
            pipe = f"/proc/{request.process}/fd/{match[1]}"
            with contextlib.suppress(OSError):
                path = pipe if stat.S_ISFIFO(os.stat(pipe).st_mode) else path
        try:
            self._give(request, path, os.O_WRONLY if path != os.devnull else os.O_RDWR)
        except OSError:
            request.refuse(errno.EACCES)

    def _start(self, request: Request) -> bool:
        """Run, replace or record a program; whether it is the training."""
        words = [request.path.removeprefix(_UNFOUND), *request.words[1:]]
        name = os.path.basename(words[0])
        path, reply = self._replies.pop(request.process, ("", ""))
        again = name == "sh" and words[1:2] == [path]  # what execvp does after ENOEXEC
        in_place = name == "sed" and any(word.startswith(("-i", "--in")) for word in words)
        # Only bash takes another script after ENOEXEC.
        asking = os.path.basename(_link(request.process, "exe"))
        shell = name == "bash" or (name in _SHELLS and not asking.startswith("bash"))
        if not self._started or again or shell or (name in _READERS and not in_place):
            self._started = True
            if again:
                self._replies[request.process] = (path, reply)
            request.allow()
            return False
        if name in self.not_run and _SET_UP.isdisjoint(map(os.path.basename, self._calls[name])):
            self.obeyed = self.not_run[name]
        text = None if name in _TOOLS else self._inner(request, words, name)
        if text is None:
            if name not in _TOOLS and self._is_training(words, request):
                return True
            text = self._recorded(request, words, name)
        self._replies[request.process] = (request.path, text)
        request.refuse(errno.ENOEXEC)
        return False

    def _inner(self, request: Request, words: list[str], name: str) -> str | None:
        """What bash is to run instead of a program that runs a script, or a script's text."""
        if name in _SHELLS:
            return 'exec bash "$@"'
        if name == "srun" and "hostname" in map(os.path.basename, words[1:]):
            return "exec hostname"  # that of another machine would be a word, too
        path = Path(request.path)
        # Programs that pyenv and the like installed are scripts that only look for them.
        if path.parent.name != "shims" and _interpreter(path) in ("bash", *_SHELLS):
            return f'exec bash {shlex.quote(request.path)} "$@"'
        try:
            command = command_line.parse(
                words, request.environment, tasks=_tasks(request.environment)
            )
        except TTraceError:
            command = None
        if isinstance(command, ShellScript):
            variables = {**command.environment, _TASKS: json.dumps(dict(command.tasks))}
            assigned = [f"{key}={value}" for key, value in variables.items()]
            start = shlex.join(["exec", "env", *assigned, "bash", *command.words])
            return f"cd {shlex.quote(command.folder)}\n{start}" if command.folder else start
        return "exec bash" if name == "sbatch" else None  # the script is on its standard input

    def _is_training(self, words: list[str], request: Request) -> bool:
        """Whether this is the training command, which is kept then.

        A script of Python without a launcher may also prepare something: it is the training only
        if nothing better comes.
        """
        variables, process = request.environment, request.process
        try:
            command = command_line.parse(words, variables, tasks=_tasks(variables))
        except command_line.NoScriptError:
            return False
        except TTraceError as error:
            self._refused = str(error)
            return False
        if not isinstance(command, Command) or not command.arguments:
            return False
        launched = command.ranks is not None or "train" in os.path.basename(command.script)
        if self.command is None or launched:
            self.command = self._placed(self._with_variables(command, variables), process)
        return launched

    def _placed(self, command: Command, process: int) -> Command:
        """With the folder to which the script has changed, if it is not the one it began in."""
        if os.path.isabs(command.script):
            return command
        if not (start := _link(process, "cwd")):
            return command
        folder = str(Path(start, command.folder))
        same = os.path.realpath(folder) == os.path.realpath(self._directory)
        return dataclasses.replace(command, folder="" if same else folder)

    def _with_variables(self, command: Command, variables: Mapping[str, str]) -> Command:
        """With variables as they are where the training starts: a script may change them."""
        assigned = {
            name: value
            for name, value in variables.items()
            if (name in self._script.environment or name.startswith(_VARIABLES))
            and os.environ.get(name) != value
        }
        unset = tuple(
            name for name in os.environ if name.startswith(_VARIABLES) and name not in variables
        )
        for name in command.unset:
            assigned.pop(name, None)
        return dataclasses.replace(
            command,
            environment={**assigned, **command.environment},
            unset=(*unset, *command.unset),
            # Where the shell found it is not what the script says.
            interpreter="",
        )

    def _recorded(self, request: Request, words: list[str], name: str) -> str:
        """What bash is to run instead of a program that is not run; what that would change."""
        if name in _KEEP_CONTENT:
            return ":"
        mark = str(_MARK + len(self.not_run))
        self.not_run[mark], self._calls[mark] = name, words
        folder = _link(request.process, "cwd") or os.path.dirname(request.path)
        for word in words[1:]:
            for part in {word, word.partition("=")[2]} - {""}:
                self._changed[os.path.realpath(os.path.join(folder, part))] = name
        # Of the nodes there are some.
        is_nodes = name == "scontrol" and "show" in words and self._reply != _TWO_LINES
        return (_ONE_LINE if is_nodes else self._reply).replace("{mark}", mark)
