# SPDX-License-Identifier: Apache-2.0
"""``ttrace compare``: judge saved traces, without running anything."""

import argparse

from megatron_ttrace.cli import command
from megatron_ttrace.jobs import flags
from megatron_ttrace.saved import api

SUMMARY = "compare two saved traces"
EPILOG = """\
example:
  ttrace check --nproc-per-node 2 --ttrace-save-candidate -- launch/pretrain_gpt.py ...
  ttrace compare ttrace-out/reference ttrace-out/candidate

The report is written beside the candidate, or to --output. A reference made on one machine can be
compared with candidates saved on others.

exit code: 0 equivalent, 1 diverged, 2 could not check
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("reference", type=flags.path, metavar="REFERENCE_DIR")
    parser.add_argument("candidate", type=flags.path, metavar="CANDIDATE_DIR")
    parser.add_argument(
        "--output",
        type=flags.path,
        metavar="DIR",
        help="directory for the report (default: the parent of CANDIDATE_DIR)",
    )
    command.add_report(parser)


def run(args: argparse.Namespace) -> int:
    """Compare, and show the report."""
    report = api.compare(
        args.reference,
        args.candidate,
        output=args.output,
        allow_unchecked=args.allow_unchecked,
        wandb=args.wandb,
        show=not args.json,
    )
    return command.answered(report, as_json=args.json)
