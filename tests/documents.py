# SPDX-License-Identifier: Apache-2.0
"""Commands that stand in documents, so that a test can run them as a reader does.

A block of commands follows a comment that says what becomes of it::

    <!-- tested -->          it runs, with exit code 0
    <!-- tested: exit 1 -->  it runs, with this exit code
    <!-- not run: why -->    it cannot be run in a test

Blocks of a document build on each other, in one directory.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

from tests import programs, warm
from tests.programs import ROOT

_BLOCK = re.compile(r"(?:<!-- ([^>]*) -->\n)?```bash\n(.*?)```", re.DOTALL)
_TESTED = re.compile(r"tested(?:: exit (\d))?")


@dataclasses.dataclass(frozen=True)
class Block:
    """Commands, the exit code they must have, and why they are not run, if so."""

    text: str
    code: int = 0
    excuse: str = ""
    unmarked: bool = False


def blocks(path: str) -> list[Block]:
    """The blocks of bash in a document of this repository."""
    found = []
    for mark, text in _BLOCK.findall((ROOT / path).read_text(encoding="utf-8")):
        tested = _TESTED.fullmatch(mark)
        if tested:
            found.append(Block(text, int(tested[1] or 0)))
        elif mark.startswith("not run: "):
            found.append(Block(text, excuse=mark.removeprefix("not run: ")))
        else:
            found.append(Block(text, unmarked=True))
    return found


def run(block: Block, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a block in ``folder``, which looks like a checkout, with this checkout's commands."""
    for name in ("launch", "README.md", "Makefile", "docs", "patches", "megatron_ttrace"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    tools = folder / ".tools"
    tools.mkdir(exist_ok=True)
    through = f"{sys.executable} -S {ROOT / 'tests' / 'warm.py'} {warm.address()}"
    for name, words in (("ttrace", "-m megatron_ttrace"), ("python", "")):
        # What python is told to run in a word or two is quicker cold.
        cold = f'[[ $1 == -c ]] && exec {sys.executable} "$@"\n' if not words else ""
        (tools / name).write_text(f'#!/bin/bash\n{cold}exec {through} {words} "$@"\n')
        (tools / name).chmod(0o755)
    variables = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "TTRACE_CACHE": os.environ["TTRACE_TEST_REFERENCES"],
        # Its service is needed: integration/test_wandb.py.
        "WANDB_MODE": "disabled",
    }
    words = ("bash", "-euo", "pipefail", "-c", block.text)
    return programs.run(*words, cwd=folder, timeout=840, **variables)


def check(block: Block, folder: Path) -> str:
    """Run a block and require its exit code; what it printed."""
    done = run(block, folder)
    assert done.returncode == block.code, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout
