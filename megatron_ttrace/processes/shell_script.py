# SPDX-License-Identifier: Apache-2.0
"""The training command that a shell script would start.

The script is run with stand-ins for the launchers (torchrun, python, srun, ...), which write down
how they are called and start nothing. Only the shell knows its arrays, conditions and defaults.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from megatron_ttrace.errors import TTraceError
from megatron_ttrace.mcore import command_line
from megatron_ttrace.mcore.command_line import Command, ShellScript

_STAND_INS = ("torchrun", "ft_launcher", "python", "python3", "srun", "mpirun", "nsys", "uv")
_SECONDS = 20
_RECORDER = """\
import json, os, sys
name, *words = sys.argv[1:]
with open({file!r}, "a") as file:
    print(json.dumps([[os.path.basename(name), *words], dict(os.environ)]), file=file)
"""
_SUBMIT = '#!/bin/sh\n# The batch script stands on standard input, or is a file.\nexec bash "$@"\n'
_VARIABLES = ("CUDA", "NCCL", "NVTE", "TORCH", "PYTORCH", "CUBLAS")
"""Prefixes of what a script sets for the training, apart from what it sets for itself."""


def resolve(script: ShellScript, directory: Path | None = None) -> Command:
    """Run the script without its launchers.

    Args:
        script: what to run.
        directory: where; by default here.

    Raises:
        TTraceError: when it does not exist, fails, or starts no training script.
    """
    path = Path(script.words[0])
    if not path.is_file():
        raise TTraceError(f"{path}: no such script")
    with tempfile.TemporaryDirectory(prefix="ttrace-") as folder:
        log = Path(folder, "calls")
        _write_stand_ins(Path(folder), log)
        environment = {**os.environ, **script.environment}
        environment["PATH"] = os.pathsep.join([folder, environment.get("PATH", os.defpath)])
        try:
            done = subprocess.run(
                ["bash", *script.words],
                cwd=directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise TTraceError(
                f"{path} did not come to its training command within {_SECONDS} s"
            ) from error
        except OSError as error:
            raise TTraceError(f"{path} cannot be run: {error.strerror}") from error
        calls = log.read_text(encoding="utf-8").splitlines() if log.is_file() else []
    for call in calls:
        words, variables = json.loads(call)
        found = _training(words)
        if found is not None:
            # As they are where the training starts: the script may change what it was given.
            own = {
                name: value
                for name, value in variables.items()
                if (name in script.environment or name.startswith(_VARIABLES))
                and os.environ.get(name) != value
            }
            return dataclasses.replace(
                found,
                environment={**own, **found.environment},
                unset=tuple(
                    name
                    for name in os.environ
                    if name.startswith(_VARIABLES) and name not in variables
                ),
            )
    last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
    why = f": {last[0]}" if last else ""
    raise TTraceError(f"{path} starts no training script of Megatron's{why}")


def _training(words: list[str]) -> Command | None:
    try:
        found = command_line.parse(words)
    except TTraceError:
        return None
    return found if isinstance(found, Command) and found.arguments else None


def _write_stand_ins(folder: Path, log: Path) -> None:
    recorder = _RECORDER.format(file=str(log))
    # Not "#!PYTHON": the kernel takes the path of an interpreter up to its first space.
    launcher = f'#!/bin/sh\nexec {shlex.join([sys.executable, "-I", "-c", recorder])} "$0" "$@"\n'
    for name, text in {**dict.fromkeys(_STAND_INS, launcher), "sbatch": _SUBMIT}.items():
        file = folder / name
        file.write_text(text, encoding="utf-8")
        file.chmod(0o755)
