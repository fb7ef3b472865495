# SPDX-License-Identifier: Apache-2.0
"""``ttrace checkpoint``: whether two checkpoints hold the same weights."""

from __future__ import annotations

import argparse
import json
from collections import Counter

from megatron_ttrace.cli import command
from megatron_ttrace.jobs import flags
from megatron_ttrace.trace.errors import ExitCode

_EPILOG = """\
examples:
  ttrace checkpoint checkpoints/tp8 checkpoints/pp4
  ttrace checkpoint before/iter_0001000 converted/iter_0001000

Formats: distributed checkpoints (--ckpt-format torch_dist) of any layout, and safetensors; the
older format torch must be converted first. Megatron loads distributed checkpoints, as it does when
it trains: only compare those that you would train from. Only weights are compared, bit by bit; if
dtypes differ, after rounding to the narrower one.

exit code: 0 the same weights, 1 not, 2 could not compare
"""
_SHOWN = 40


def add_parser(subparsers: command.Subparsers) -> argparse.ArgumentParser:
    """Add the ``checkpoint`` command."""
    parser = command.add(
        subparsers,
        "checkpoint",
        run,
        summary="compare the weights of two checkpoints, in any layouts",
        epilog=_EPILOG,
    )
    for name in ("A", "B"):
        help = "directory of a checkpoint, or of one iteration of it"
        parser.add_argument(name.lower(), type=flags.path, metavar=name, help=help)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def run(args: argparse.Namespace) -> int:
    """Compare, and list what is not the same."""
    from megatron_ttrace.mcore.checkpoints.stored import open_checkpoint
    from megatron_ttrace.saved.weights import compare
    from megatron_ttrace.trace.sanitise import clean
    from megatron_ttrace.trace.states import State

    opened = [open_checkpoint(folder).tensors for folder in (args.a, args.b)]
    a, b = ({i.name: s for i, s in one.items() if i.state is State.WEIGHT} for one in opened)
    found = list(compare(a, b))
    different = [one for one in found if not one.same.is_same]
    counts = Counter(one.same.value for one in found)
    code = ExitCode.DIVERGED if different else ExitCode.EQUIVALENT
    if args.json:
        answer = {"same": not different, "counts": counts, "weights": [w.to_json() for w in found]}
        print(json.dumps(answer, indent=1))
        return code
    told = ", ".join(f"{count} {what}" for what, count in counts.items())
    print(f"ttrace: {'other' if different else 'the same'} weights: {told}")
    for one in different[:_SHOWN]:
        error = "" if one.rel_err is None else f", relative error {one.rel_err:.3g}"
        note = f" ({one.note})" if one.note else ""
        print(clean(f"  {one.name}: {one.same}{error}{note}"))
    if len(different) > _SHOWN:
        print(f"  and {len(different) - _SHOWN} more (--json lists all)")
    for note in dict.fromkeys(one.note for one in found if one.same.is_same and one.note):
        print(clean(f"  {note}"))
    return code
