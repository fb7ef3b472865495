# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.assay models``: the table of docs/models.md."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ttrace.cli import command
from megatron_ttrace.jobs import flags
from megatron_ttrace.jobs.commands import shell_script
from megatron_ttrace.jobs.commands.command_line import ShellScript
from megatron_ttrace.jobs.shrink import axes
from megatron_ttrace.jobs.shrink.command_flags import CommandFlags
from megatron_ttrace.trace.errors import ExitCode

SCRIPTS = Path(__file__).parents[2] / "launch" / "models"
_HEADER = re.compile(r"# (?P<model>.+) on (?P<gpus>\d+) GPUs, laid out as in (?P<source>.+)\.")
_BRIDGE = "Megatron-Bridge's "
_EPILOG = """\
example:
  ttrace recipes launch/models --directory flags
  ttrace recipes --bridge --only '*/*pretrain*' --directory bridge
  python -m tests.assay models flags/recipes.json bridge/recipes.json
"""


def add_parser(subparsers: command.Subparsers) -> None:
    """Add the ``models`` command."""
    parser = command.add(
        subparsers, "models", run, summary="print the table of docs/models.md", epilog=_EPILOG
    )
    parser.add_argument("results", type=flags.path, nargs="+", metavar="RECIPES.JSON")


def run(args: argparse.Namespace) -> int:
    """Print a row for each script."""
    results: dict[str, Mapping[str, Any]] = {}
    for file in args.results:
        results |= {row["name"]: row for row in json.loads(file.read_text())["recipes"]}
    print("| model | GPUs | layout | Megatron-LM | Megatron-Bridge | `ttrace check --shrink --` |")
    print("|---|---|---|---|---|---|")
    for script in sorted(SCRIPTS.glob("*.sh")):
        print(row_of(script, results))
    return ExitCode.EQUIVALENT


def header_of(script: Path) -> re.Match[str]:
    """What a script says of itself."""
    match = _HEADER.search(script.read_text())
    assert match is not None, script
    return match


def row_of(script: Path, results: Mapping[str, Mapping[str, Any]]) -> str:
    """The row of a script, by the names of recipes."""
    header = header_of(script)
    command_line = shell_script.resolve(ShellScript((str(script),)))
    large = axes.of_large(CommandFlags.parse(command_line.arguments), command_line.ranks)
    layout = ", ".join(f"{name} {getattr(large, name)}" for name in large.spread())
    recipe = header["source"].removeprefix(_BRIDGE)
    cells = (
        header["model"],
        header["gpus"],
        layout,
        _answer(results.get(script.name)),
        _answer(results.get(recipe)) if header["source"].startswith(_BRIDGE) else "no recipe",
        f"`launch/models/{script.name}`",
    )
    return f"| {' | '.join(cells)} |"


def _answer(row: Mapping[str, Any] | None) -> str:
    if row is None or row["answer"] is None:
        return "not run"
    return f"finding: {row['finding']}" if row["finding"] else str(row["answer"])
