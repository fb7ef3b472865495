# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.assay``: how good is the checker? Mutants, planted errors, faults, answers.

Exit codes are those of ``ttrace``; ``python -m tests.assay COMMAND --help`` has examples.
"""

import argparse
import sys
from collections.abc import Sequence

from megatron_ttrace.cli import command
from megatron_ttrace.cli import main as ttrace
from tests.assay import blame, bridge, conversions, huggingface, models, plant, same
from tests.assay.checkpoints import campaign as checkpoints
from tests.assay.faults import campaign as faults
from tests.assay.faults.fuzz import harness as fuzz
from tests.assay.mutants import campaign as mutants


def build_parser(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The command line."""
    del words
    parser = command.Parser(
        prog="python -m tests.assay",
        description="Evaluate the checker itself.",
        epilog="example:\n  python -m tests.assay mutants run --count 20",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in (
        *(mutants, faults, fuzz, plant, checkpoints, conversions),
        *(bridge, huggingface, blame, models, same),
    ):
        module.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    return ttrace.main(argv, build_parser)


if __name__ == "__main__":
    sys.exit(main())
