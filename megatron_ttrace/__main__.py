# SPDX-License-Identifier: Apache-2.0
"""``ttrace`` and ``python -m megatron_ttrace``."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from megatron_ttrace import __version__
from megatron_ttrace.errors import ExitCode, TTraceError

COMMANDS = (
    "megatron_ttrace.cli.check",
    "megatron_ttrace.cli.compare",
    "megatron_ttrace.cli.plant",
    "megatron_ttrace.report.cli",
    "megatron_ttrace.cli.matrix",
    "megatron_ttrace.cli.bugs",
    "megatron_ttrace.cli.rivals",
    "megatron_ttrace.mutants.cli",
    "megatron_ttrace.cli.growth",
    "megatron_ttrace.nightly.cli",
    "megatron_ttrace.cli.doctor",
    "megatron_ttrace.megatron_lm.cli",
    "megatron_ttrace.data.cli",
    "megatron_ttrace.cli.demo",
)
"""Modules with ``add_parser(subparsers)``; parsing imports neither torch nor Megatron."""


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="ttrace",
        description="Is this Megatron run numerically the single-device run?",
        epilog="exit codes: 0 equivalent, 1 diverged, 2 could not check",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ttrace {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        importlib.import_module(name).add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    args = build_parser().parse_args(argv)
    try:
        return int(args.run(args))
    except TTraceError as error:
        print(f"ttrace: {error}", file=sys.stderr)
        return int(ExitCode.COULD_NOT_CHECK)
    except KeyboardInterrupt:
        print("ttrace: interrupted", file=sys.stderr)
        return int(ExitCode.COULD_NOT_CHECK)


if __name__ == "__main__":
    sys.exit(main())
