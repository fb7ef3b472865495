# SPDX-License-Identifier: Apache-2.0
"""``ttrace compare``: judge saved traces, without running anything."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from typing import Any

from megatron_ttrace.errors import TTraceError
from megatron_ttrace.mcore import flags, inputs

_EPILOG = """\
example:
  ttrace check --nproc-per-node 2 --ttrace-save-candidate -- launch/pretrain_gpt.py ...
  ttrace compare ttrace-out/reference ttrace-out/candidate

The report is written beside the candidate, or to --output. A reference made on one machine can be
compared with candidates saved on others.

exit code: 0 equivalent, 1 diverged, 2 could not check
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the ``compare`` command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "compare",
        help="compare two saved traces",
        description="Compare a candidate's saved trace with a reference's.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("reference", type=flags.path, metavar="REFERENCE_DIR")
    parser.add_argument("candidate", type=flags.path, metavar="CANDIDATE_DIR")
    parser.add_argument(
        "--output",
        type=flags.path,
        metavar="DIR",
        help="where to write the report (default: beside)",
    )
    parser.add_argument(
        "--allow-unchecked",
        "--ttrace-allow-unchecked",
        type=float,
        default=flags.DEFAULT_ALLOW_UNCHECKED,
        metavar="SHARE",
        help="share of tensors that may be unchecked (default %(default)s); above it the answer "
        "is 'could not check'",
    )
    parser.add_argument("--wandb", action="store_true", help="log the report to W&B, too")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure rank by rank with the code that measures in a running job."""
    import io

    from rich.console import Console

    from megatron_ttrace.compare import tolerance
    from megatron_ttrace.compare.offline import epsilon_of, measure_saved, meshes_of
    from megatron_ttrace.report import publish
    from megatron_ttrace.runtime.conclusion import conclude
    from megatron_ttrace.trace import shared
    from megatron_ttrace.trace.sanitise import clean
    from megatron_ttrace.trace.store import TraceReader

    if not 0 <= args.allow_unchecked <= 1:
        raise TTraceError(f"--allow-unchecked {args.allow_unchecked}: give a share from 0 to 1")
    began = time.monotonic()
    for folder in (args.reference, args.candidate):
        inputs.require_regular_folder(folder)
    reference, candidate = TraceReader(args.reference), TraceReader(args.candidate)
    for trace, role in ((reference, "reference"), (candidate, "candidate")):
        if trace.meta.get("role") != role:
            raise TTraceError(f"{trace.directory} is no {role} trace: give REFERENCE CANDIDATE")
    if not candidate.meta.get("complete"):
        raise TTraceError(
            f"{args.candidate} holds failed tensors only: trace with --ttrace-save-candidate"
        )
    epsilon_of(reference)
    meshes = meshes_of(candidate)
    try:
        summary, verdicts = conclude(
            reference,
            tolerance.of_reference(reference),
            measure_saved(reference, candidate),
            candidate=args.candidate,
            mesh=meshes[0],
            config=_config(candidate.meta.get("config")),
            timings={"measure": time.monotonic() - began},
            allow_unchecked=args.allow_unchecked,
        )
    except (ArithmeticError, ValueError) as error:
        # Numbers that are each in range, and not of one run.
        raise TTraceError(
            f"{args.candidate} and {args.reference} contradict themselves or each other "
            f"({clean(error)}): run the traced job again"
        ) from error
    output = args.output or args.candidate.parent
    console = Console(file=io.StringIO()) if args.json else None
    with shared.claim_report(output, candidate.meta["run"]):
        publish(
            summary,
            verdicts,
            output,
            wandb=args.wandb,
            console=console,
            run_id=candidate.meta["run"],
        )
    if args.json:
        print(json.dumps(summary.to_json(), indent=1))
    return int(summary.verdict.exit_code)


def _config(found: Any) -> dict[str, Any]:
    """The candidate's configuration, as far as the comparison reads it.

    Raises:
        CodecError: when it is not one.
    """
    from megatron_ttrace.compare.exactness import Arithmetic
    from megatron_ttrace.trace import codec

    config = codec.decoder(dict[str, Any])(found)
    if isinstance(config.get("arithmetic"), Mapping):
        Arithmetic.from_json(config["arithmetic"])
    return dict(config)
