# SPDX-License-Identifier: Apache-2.0
"""Odd commands as users quote and paste them: understood as a shell would, or refused."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from megatron_ttrace.jobs.commands import command_line
from megatron_ttrace.trace.errors import TTraceError
from tests.faults.experiment import Experiment
from tests.faults.fault import Family, Fault, Problem


@dataclasses.dataclass(frozen=True, slots=True)
class Quoted:
    """A text, and what a shell and its launcher make of it.

    Attributes:
        words: one text, or the words of a command.
        arguments: of the training script; ``None`` where nothing but a refusal is right.
        environment: what the ranks must have.
    """

    words: tuple[str, ...]
    arguments: str | None = "--a 1 --b 2"
    ranks: int | None = 2
    environment: tuple[tuple[str, str], ...] = ()

    def inject(self, experiment: Experiment) -> None:
        """Read it."""
        x, x.injected = experiment, True
        try:
            command = command_line.parse(self.words, {"HOME": _HOME})
        except TTraceError as error:
            x.said = f"refused: {error}"
            if "\n" in str(error):
                x.problem(Problem.NO_LINE, "several lines")
            return
        x.said = str(command)
        if isinstance(command, command_line.ShellScript):
            x.problem(Problem.MISREAD, "a shell script")
            return
        if not Path(command.script).name.endswith(".py") or " " in command.script:
            return  # Refused later: there is no such script.
        expected = None if self.arguments is None else self.arguments.split()
        if list(command.arguments) != expected:
            x.problem(Problem.MISREAD, f"arguments {command.arguments}, not {expected}")
        if command.ranks != self.ranks:
            x.problem(Problem.MISREAD, f"{command.ranks} ranks, not {self.ranks}")
        if any(command.environment.get(name) != value for name, value in self.environment):
            x.problem(Problem.MISREAD, f"environment {dict(command.environment)}")


RUN = "torchrun --nproc-per-node 2 x.py --a 1"
_HOME = os.path.expanduser("~")


def _words(
    name: str, words: tuple[str, ...], arguments: str | None = "--a 1 --b 2", **more: object
) -> Fault:
    action = Quoted(words, arguments, **more)  # type: ignore[arg-type]
    return Fault(f"command-{name}", Family.COMMANDS, action)


def _text(name: str, text: str, arguments: str | None = "--a 1 --b 2", **more: object) -> Fault:
    return _words(name, (text,), arguments, **more)


FAULTS = (
    _text("redirected-amid", f"{RUN} > log.txt --b 2"),
    _text("redirected-error-amid", f"{RUN} 2> log.txt --b 2"),
    _text("long-descriptor", f"{RUN} 12>log --b 2"),
    _text("named-descriptor", RUN + " {fd}>log --b 2"),
    _text("output-to-a-process", f"{RUN} > >(tee log) 2>&1 --b 2"),
    _text("input-from-a-process", f"{RUN} --b <(echo 2)", None),
    _text("here-string", f"{RUN} --b 2 <<< yes"),
    _text("here-document-of-flags", f"{RUN} <<EOF\n--b 2\nEOF", None),
    _text("redirected-to-a-space", f"{RUN} > log\\ file --b 2"),
    _text("redirected-to-quotes", f"{RUN} > 'log file' --b '2' 2> 'it s'"),
    _text(
        "braces", "torchrun --nproc-per-node 2 x.py --a /d/{1,2}_text", "--a /d/1_text /d/2_text"
    ),
    _text("a-range", "torchrun --nproc-per-node 2 x.py --a {1..3}", "--a 1 2 3"),
    _text("tilde", "torchrun --nproc-per-node 2 x.py --a ~/1 --b 2", f"--a {_HOME}/1 --b 2"),
    _text("ansi-quotes", "torchrun --nproc-per-node 2 x.py --a $'1' --b 2"),
    _text("locale-quotes", 'torchrun --nproc-per-node 2 x.py --a $"1" --b 2'),
    _text("ansi-escape", "torchrun --nproc-per-node 2 x.py --a $'\\x31' --b 2"),
    _text("prompts", f"$ {RUN} \\\n> --b 2"),
    _text("prompt-without-dollar", f"{RUN} \\\n> --b 2", None),
    _text("a-loop", "for i in 1 2; do torchrun --nproc-per-node 2 x.py --a $i; done", None),
    _text("arithmetic", "torchrun --nproc-per-node $((1 + 1)) x.py --a 1 --b 2"),
    _text("history", f"{RUN} --b !$", "--a 1 --b !$"),
    _text("markdown", f"```bash\n{RUN}\n--b 2\n```"),
    _text("assignment-of-the-same-line", "A=1 torchrun --nproc-per-node 2 x.py --a $A --b 2", None),
    _text(
        "appending-assignment",
        f"PYTHONPATH+=:/x {RUN} --b 2",
        environment=(("PYTHONPATH", ":/x"),),
    ),
    _text("several-programs", "mpirun -np 1 python x.py --a 1 : -np 1 python x.py --b 2", None),
    _text("non-breaking-space", f"{RUN}\u00a0--b 2", None),
    _text("form-feed", f"{RUN}\f--b 2", None),
    _text("a-nested-text", f"bash -c 'bash -c \"{RUN} --b 2\"'"),
    _words(
        "positional-of-a-shell",
        ("bash", "-c", 'torchrun --nproc-per-node 2 x.py "$@"', "_", "--a", "1", "--b", "2"),
    ),
    _words(
        "default-in-a-shell", ("bash", "-c", "torchrun --nproc-per-node 2 x.py --a ${A:-1} --b 2")
    ),
    _words(
        "loop-in-a-shell",
        ("bash", "-c", "for i in 1 2; do torchrun --nproc-per-node 2 x.py --a $i; done"),
        None,
    ),
    _words("branch-in-a-shell", ("bash", "-c", f"if false; then {RUN}; else {RUN} --b 2; fi")),
    _words("file-in-a-shell", ("bash", "-c", f"{RUN} $(cat job.txt)"), None),
    _words("two-in-a-shell", ("bash", "-c", f"false && {RUN}; {RUN} --b 2")),
    _words("shortened-option", ("torchrun", "--nproc-per", "2", "x.py", "--a", "1", "--b", "2")),
    _words("shortened-with-equals", ("torchrun", "--nproc=2", "x.py", "--a", "1", "--b", "2")),
    _words(
        "glued-option", ("torchrun", "-t3", "--nproc-per-node", "2", "x.py", "--a", "1", "--b", "2")
    ),
    _words(
        "glued-module",
        (
            "python",
            "-mtorch.distributed.run",
            "--nproc-per-node",
            "2",
            "x.py",
            "--a",
            "1",
            "--b",
            "2",
        ),
    ),
    _words(
        "ranks-in-the-environment",
        ("PET_NPROC_PER_NODE=2", "torchrun", "x.py", "--a", "1", "--b", "2"),
    ),
    _words(
        "exported-by-srun",
        ("srun", "-n2", "--export=ALL,NVTE_X=1", "python", "x.py", "--a", "1", "--b", "2"),
        environment=(("NVTE_X", "1"),),
    ),
    _words(
        "exported-by-mpirun",
        ("mpirun", "-np", "2", "-x", "NVTE_X=1", "python", "x.py", "--a", "1", "--b", "2"),
        environment=(("NVTE_X", "1"),),
    ),
    _words(
        "variable-of-docker",
        ("docker", "run", "-e", "NVTE_X=1", "image", *f"{RUN} --b 2".split()),
        environment=(("NVTE_X", "1"),),
    ),
    _words(
        "end-of-options",
        ("torchrun", "--nproc-per-node", "2", "--", "x.py", "--a", "1", "--b", "2"),
    ),
    _words("env-of-a-text", ("env", "-S", f"NVTE_X=1 {RUN} --b 2"), environment=(("NVTE_X", "1"),)),
)
