# SPDX-License-Identifier: Apache-2.0
"""The training script, its arguments and the number of ranks in a command as users have it.

``torchrun``, ``python -m torch.distributed.run``, ``srun`` and the like, environment assignments
and wrappers before them, or one text with all of it on several lines. Nothing is run and no file is
read: a shell script is recognised, and ``jobs/commands/shell_script.py`` reads it.
"""

import copy
import dataclasses
import os
import re
from collections.abc import Iterator, Mapping, Sequence

from megatron_ttrace.jobs.commands import disclosure, shell_text
from megatron_ttrace.jobs.commands.shell_text import UNKNOWN
from megatron_ttrace.trace.errors import TTraceError

EXAMPLE = "torchrun --nproc-per-node 2 pretrain_gpt.py --tensor-model-parallel-size 2 ..."

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_PYTHON = re.compile(r"python[0-9.]*")
_TORCHRUN = ("torchrun", "ft_launcher")
_TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_SHELLS = ("bash", "sh", "zsh")
_PREFIXES = ("env", "exec", "export", "nohup", "time", "command")
_TORCHRUN_SWITCHES = frozenset(
    {"standalone", "no-python", "run-path", "use-env", "virtual-local-rank", "module", "m"}
)
"""Options of torchrun without a value (torch/distributed/run.py)."""
_TORCHRUN_SHORT = {"m": "module", "r": "redirects", "t": "tee"}
_COUNTS = frozenset({"nproc-per-node", "nnodes"})
_PYTHON_SWITCHES = "bBdEhiIOPqRsSuvVx?"
_SRUN_SWITCHES = "EHlOQsuvXZ"
_MPI = dict.fromkeys(("n", "np", "c"), "tasks") | dict.fromkeys(
    ("N", "npernode", "ppn", "perhost"), "per node"
)
_TASKS: Mapping[str, Mapping[str, str]] = {
    "srun": dict.fromkeys(("n", "ntasks"), "tasks")
    | dict.fromkeys(("N", "nodes"), "nodes")
    | dict.fromkeys(("ntasks-per-node", "tasks-per-node"), "per node"),
    "mpirun": _MPI,
    "mpiexec": _MPI,
    "horovodrun": {"np": "tasks", "num-proc": "tasks"},
    "accelerate": {"num-processes": "tasks", "num-machines": "nodes"},
    "deepspeed": {"num-gpus": "per node", "num-nodes": "nodes"},
}
"""Options of launchers with a number of processes."""
_WRAPPERS = ("chrt", "ionice", "nice", "numactl", "taskset")
"""Programs before others whose options are like those of launchers."""
_LAUNCHERS = frozenset({*_TASKS, "ray"})
"""Launchers that may be scripts of Python themselves, apart from torchrun's."""


def _processes(tasks: Mapping[str, int]) -> int | None:
    """How many processes launchers start in all; ``None`` without any number."""
    per_node = tasks.get("per node")
    return tasks.get("tasks") or (per_node and per_node * tasks.get("nodes", 1))


class NoScriptError(TTraceError):
    """A command without a training script."""


@dataclasses.dataclass(frozen=True)
class Command:
    """A training command.

    Attributes:
        script: as it is written.
        environment: what is assigned before it.
        ranks: how many it starts in all, or ``None`` where nothing shows that.
        nodes: on how many machines.
        unset: variables that it must not inherit.
        uncounted: what leaves the number of ranks to the machine, if something does.
        interpreter: the Python that it names with its folder, or the one beside such a torchrun.
        folder: where ``cd`` leads before a script by a relative path starts, if that is known.
    """

    script: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ranks: int | None = None
    nodes: int = 1
    unset: tuple[str, ...] = ()
    uncounted: str = ""
    interpreter: str = ""
    folder: str = ""


@dataclasses.dataclass(frozen=True)
class ShellScript:
    """The words of a shell script that starts the training somewhere, and what is assigned before.

    ``tasks``: how many processes run it, as :func:`parse` takes it; ``folder``: as of ``Command``.
    """

    words: tuple[str, ...]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tasks: Mapping[str, int] = dataclasses.field(default_factory=dict)
    folder: str = ""


@dataclasses.dataclass
class _Context:
    """What the words before the script set.

    ``uncounted``, ``interpreter`` and ``folder`` are those of ``Command``; ``inherited`` are
    variables that a shell within has.
    """

    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    tasks: dict[str, int] = dataclasses.field(default_factory=dict)
    uncounted: str = ""
    interpreter: str = ""
    folder: str = ""
    inherited: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def script(self, words: Sequence[str]) -> ShellScript:
        if self.uncounted:
            raise TTraceError(f"{self.uncounted} leaves the number of ranks open: give the number")
        return ShellScript(tuple(words), dict(self.environment), dict(self.tasks), self.folder)


def parse(
    words: Sequence[str],
    environment: Mapping[str, str] | None = None,
    tasks: Mapping[str, int] | None = None,
) -> Command | ShellScript:
    """Find the training script in a command.

    Args:
        words: the command as a shell splits it, or one word with the whole text. A line of a text
            that begins with ``-`` continues the command.
        environment: values of variables that a text, or one after ``bash -c``, mentions.
        tasks: what a launcher around the command starts: "tasks" in all, "per node", "nodes".

    Raises:
        NoScriptError: when there is no training script in it.
        TTraceError: when a part of it is not understood.
    """
    context = _Context(tasks=dict(tasks or {}), inherited=dict(environment or {}))
    if len(words) == 1 and re.search(r"\s", words[0].strip()):
        command = _text(words[0], context)
    else:
        command = _words(list(words), context)
    if command is None:
        raise NoScriptError(
            f"no training script in this command: give one, e.g. ttrace check -- {EXAMPLE}"
        )
    return command


def is_launcher(word: str) -> bool:
    """Whether a program, maybe given by its path, starts training scripts."""
    name = os.path.basename(word)
    known = {*_TORCHRUN, *_SHELLS, *_PREFIXES, *_LAUNCHERS}
    return name in known or bool(_PYTHON.fullmatch(name))


def _text(text: str, context: _Context) -> Command | ShellScript | None:
    """The one command of a text, after assignments and changes of the folder.

    Other commands are refused, and parts that only a shell could evaluate.
    """
    command = None
    for statement in shell_text.statements(text):
        words = shell_text.words(statement, {**context.inherited, **context.environment})
        if words[0] == "cd" and command is None:
            context = dataclasses.replace(context, folder=_changed(context.folder, words[1:]))
            continue
        before = words
        while before and (before[0] == "export" or _ASSIGNMENT.fullmatch(before[0])):
            before = before[1:]
        if before and (command is not None or before[0].startswith(("(", "{"))):
            raise TTraceError(
                f"the quoted text has several commands, at {_quoted(words)}: give the training "
                "command alone, with its arguments on lines that begin with -"
            )
        command = _words(words, context) or command
        if before and command is None:
            raise NoScriptError(
                f"no training script in this command: {_quoted(words)}; give the "
                f"training command alone, e.g. ttrace check -- {EXAMPLE}"
            )
    return command


def _inner_text(text: str, context: _Context) -> Command | ShellScript | None:
    """The text after ``bash -c``: the one of its statements that has a training script.

    Refused are a line that begins with ``-``, which is a different command for a shell, several
    statements that have one, and what the training is given that only a shell could evaluate.
    """
    training: Command | ShellScript | None = None
    unset: dict[str, None] = {}
    for statement in shell_text.statements(text, lines=True):
        known = {**context.inherited, **context.environment}
        words = shell_text.words(statement, known, strict=False)
        if words[0].startswith("-"):
            raise TTraceError(
                f"in the text after -c, a line that begins with {_quoted(words[:1])} is a new "
                "command: end the line before it with a backslash"
            )
        if words[0] == "unset":
            unset |= dict.fromkeys(word for word in words[1:] if not word.startswith("-"))
            kept = {k: v for k, v in context.environment.items() if k not in unset}
            context = dataclasses.replace(context, environment=kept)
            continue
        if words[0] == "cd":
            context = dataclasses.replace(context, folder=_changed(context.folder, words[1:]))
            continue
        tried = copy.deepcopy(context)
        command = _words(words, tried)
        if command is None:
            # What is assigned before another command is only for that one.
            if words[0] == "export" or all(map(_ASSIGNMENT.fullmatch, words)):
                context = tried
            continue
        if isinstance(command, ShellScript):
            needed, is_known = command.words, not unset
        else:
            needed, is_known = (command.script, *command.arguments), True
        is_known &= not any(UNKNOWN in word for word in needed)
        if training or words[0] in _KEYWORDS or not is_known:
            raise TTraceError(
                f"only a shell can evaluate {_quoted(words)} in the text after -c: "
                f"give the training command itself, e.g. {EXAMPLE}"
            )
        training = _known(command)
    if isinstance(training, Command) and unset:
        return dataclasses.replace(training, unset=tuple(unset))
    return training


def _changed(folder: str, words: list[str]) -> str:
    """The folder after ``cd``; empty if only a shell knows it."""
    names = [word for word in words if not re.fullmatch("-[LPe@]+|--", word)]
    if len(names) != 1 or names[0] == "-" or UNKNOWN in names[0]:
        return ""
    return os.path.join(folder, os.path.expanduser(names[0]))


def _quoted(words: Sequence[str]) -> str:
    """The beginning of a command for an error, without values that may be secret."""
    shown = disclosure.command([word.replace(UNKNOWN, "") for word in words])
    return ascii(" ".join(shown)[:60])


def _known(command: Command | ShellScript) -> Command | ShellScript:
    """Without the variables that only a shell could evaluate; refused if numbers may depend on one.

    Most are about machines and ports.
    """
    variables = {k: v for k, v in command.environment.items() if UNKNOWN not in v}
    for name in command.environment.keys() - variables.keys():
        if name.startswith(_NUMERIC):
            raise TTraceError(
                f"only a shell can evaluate {name} in the text after -c: assign it before ttrace"
            )
    if isinstance(command, ShellScript):
        return dataclasses.replace(command, environment=variables)
    return dataclasses.replace(
        command,
        environment=variables,
        uncounted=command.uncounted.replace(UNKNOWN, ""),
        interpreter=command.interpreter.replace(UNKNOWN, ""),
    )


_NUMERIC = ("CUBLAS", "NVTE", "PYTHON", "PYTORCH", "TORCH")
"""Prefixes of variables that decide which code runs."""
_KEYWORDS = frozenset("! ( [[ case do elif else for function if select then until while {".split())


def _words(words: list[str], context: _Context) -> Command | ShellScript | None:
    """A single command; what it assigns is remembered."""
    while words and (match := _ASSIGNMENT.fullmatch(words[0])):
        context.environment[match[1]] = match[2]
        words = words[1:]
    if not words:
        return None
    if re.match(r"\w+\+=", words[0]):
        raise TTraceError(
            f"{words[0].partition('=')[0][:40]!a} appends to a variable: write its whole value"
        )
    name, arguments = os.path.basename(words[0]), words[1:]
    if name == "env" and arguments[:1] and arguments[0].startswith("-"):
        raise TTraceError(
            f"env {_quoted(arguments[:1])} removes variables: unset them in this shell, and give "
            "the command without it"
        )
    if name in _PREFIXES:
        return _words(arguments, context)
    folder = os.path.dirname(words[0])
    if name in _TORCHRUN:
        context.interpreter = os.path.join(folder, "python") if folder else context.interpreter
        return _torchrun(arguments, context)
    if _PYTHON.fullmatch(name):
        context.interpreter = words[0] if folder else context.interpreter
        return _python(arguments, context)
    if name in _SHELLS:
        return _shell(arguments, context)
    if name.endswith(".sh"):
        return context.script(words)
    if name.endswith(".py"):
        return _command(words, context)
    return _launched(name, arguments, context)


def _launched(launcher: str, words: list[str], context: _Context) -> Command | ShellScript | None:
    """The command behind a launcher, or a wrapper whose own options are not known: nsys, uv, ..."""
    for at, word in enumerate(words):
        name = os.path.basename(word)
        if (
            name in (*_TORCHRUN, *_SHELLS, *_TASKS, *_WRAPPERS)
            or _PYTHON.fullmatch(name)
            or name.endswith((".py", ".sh"))
        ):
            if ":" in words:
                raise TTraceError(
                    f"{_quoted([launcher])} starts several programs: give one training command"
                )
            if launcher in _TASKS:
                _read_tasks(launcher, words[:at], context)
            _read_variables(words[:at], context)
            return _words(words[at:], context)
    return None


def _read_tasks(launcher: str, options: list[str], context: _Context) -> None:
    """How many processes a launcher starts.

    Refused are a number that contradicts another launcher's, and a shortened option.
    """
    known = _TASKS[launcher]
    before, context.tasks = context.tasks, {}
    for at, word in enumerate(options):
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if launcher == "srun" and re.match("-[^-]", word):
            name = f"-{name[1:].lstrip(_SRUN_SWITCHES)}"
        if name[:1] == "-" and name[1:2] in known and name[2:].isdigit():
            name, value = name[:2], name[2:]  # -n4
        elif not equals:
            value = options[at + 1] if at + 1 < len(options) else ""
        option = name.lstrip("-") if name.startswith("-") else ""
        if option in known and value.isdigit() and int(value):
            context.tasks[known[option]] = int(value)
        elif option in known:
            context.uncounted = f"{launcher} {_quoted(options[at : at + 1])}"
        elif name.startswith("--") and any(full.startswith(option) for full in known):
            raise TTraceError(f"{launcher}'s {name!a} is abbreviated: write the full option")
    if launcher == "srun" and set(context.tasks) == {"nodes"}:
        context.tasks["tasks"] = context.tasks["nodes"]  # its default: one per node
    if _processes(context.tasks) is None and launcher in (
        "accelerate",
        "deepspeed",
        "mpirun",
        "mpiexec",
    ):
        context.uncounted = context.uncounted or f"{launcher} without a number"
    is_agent = launcher == "accelerate"  # one per node, as torchrun
    inner = context.tasks.get("nodes", 1) if is_agent else _processes(context.tasks)
    if before and context.tasks and _processes(before) != inner:
        raise TTraceError(
            f"{launcher} and the launcher around it start different numbers of processes: give "
            "one of them"
        )
    context.tasks = context.tasks or ({} if is_agent else before)


def _read_variables(options: list[str], context: _Context) -> None:
    """What a launcher or a container sets: ``-x A=1``, ``-e A=1``, ``--export=ALL,A=1``."""
    for before, word in zip(["", *options], options, strict=False):
        exported = before == "--export" or word.startswith("--export=")
        parts = word.removeprefix("--export=").split(",") if exported else [word]
        for match in filter(None, map(_ASSIGNMENT.fullmatch, parts)):
            if exported or match[1].isupper():
                context.environment[match[1]] = match[2]


def _leading(words: list[str], marks: tuple[str, ...] = ("-",)) -> Iterator[str]:
    """Take the options out of words that begin with them, as far as an end that ``--`` marks.

    The value of an option is to be taken before the next one.
    """
    while words and words[0].startswith(marks):
        if (word := words.pop(0)) == "--":
            return
        yield word


def _taken(words: list[str]) -> str:
    """The value of an option; empty if there is none."""
    return words.pop(0) if words else ""


def _torchrun(words: list[str], context: _Context) -> Command | ShellScript | None:
    options: dict[str, str] = {}
    for word in _leading(words):
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("_", "-")
        if not word.startswith("--") and name[:1] in _TORCHRUN_SHORT:
            name, value = _TORCHRUN_SHORT[name[0]], name[1:] or value  # -t3, -t=3
        elif any(full.startswith(name) and name != full for full in _COUNTS | _TORCHRUN_SWITCHES):
            raise TTraceError(f"torchrun's --{name} is abbreviated: write the full option")
        if not equals and not value and name not in _TORCHRUN_SWITCHES:
            value = _taken(words)
        if name not in _TORCHRUN_SWITCHES and (
            not value or value.startswith("-") or value.endswith(".py")
        ):
            what = "the number" if name in _COUNTS else "it (is a variable empty?)"
            raise TTraceError(f"torchrun's --{name} has no value: give {what}")
        options[name] = value
    if {"m", "module"} & set(options):
        raise TTraceError(f"{' '.join(words[:1])} is run as a module: give its file")
    if not words:
        return None
    count = options.get("nproc-per-node", context.environment.get("PET_NPROC_PER_NODE", "1"))
    per_node = _number(count)
    nodes = _nodes(options.get("nnodes", context.environment.get("PET_NNODES", "1")), context)
    ranks = per_node and per_node * nodes
    uncounted = "" if per_node else f"--nproc-per-node {count}"
    context.tasks, context.uncounted = {}, ""
    read = _words if "no-python" in options else _command
    command = read(words, context)
    if isinstance(command, Command):
        return dataclasses.replace(command, ranks=ranks, nodes=nodes, uncounted=uncounted)
    return command


def _nodes(text: str, context: _Context) -> int:
    """How many torchruns there are, each for what it calls a node; a contradiction is refused."""
    least, most = (_number(part) for part in (text.split(":")[0], text.split(":")[-1]))
    started = _processes(context.tasks)
    if started is None:
        return most or 1
    if least and most and not least <= started <= most:
        raise TTraceError(
            f"the launcher starts torchrun {started} times, but its --nnodes is {text}: give the "
            "same number to both"
        )
    return started


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() and int(text) else None


def _python(words: list[str], context: _Context) -> Command | ShellScript | None:
    for word in _leading(words):
        letters = "" if word.startswith("--") else word[1:].lstrip(_PYTHON_SWITCHES)
        option, value = letters[:1], letters[1:]
        if (option and not value) or word == "--check-hash-based-pycs":
            value = _taken(words)
        if option == "c":
            return None
        if option == "m" and value in _TORCHRUN_MODULES:
            return _torchrun(words, context)
        if option == "m":
            raise TTraceError(f"{value} is not a training script: give a file")
    return _command(words, context) if words else None


def _shell(words: list[str], context: _Context) -> Command | ShellScript | None:
    has_text = False
    for word in _leading(words, ("-", "+")):
        letters = "" if word.startswith("--") else word[1:]
        has_text |= "c" in letters
        if not {"o", "O"}.isdisjoint(letters) or word in ("--rcfile", "--init-file"):
            _taken(words)
    if not words:
        return None
    return _inner_text(words[0], context) if has_text else context.script(words)


def _command(words: list[str], context: _Context) -> Command:
    """The script at last, and the ranks that launchers other than torchrun start."""
    ranks = _processes(context.tasks)
    return Command(
        words[0],
        tuple(words[1:]),
        dict(context.environment),
        ranks,
        context.tasks.get("nodes", 1),
        uncounted="" if ranks else context.uncounted,
        interpreter=context.interpreter,
        folder="" if os.path.isabs(words[0]) else context.folder,
    )
