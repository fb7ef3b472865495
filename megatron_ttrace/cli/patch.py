# SPDX-License-Identifier: Apache-2.0
"""``ttrace patch``: add the flag to Megatron-LM's own script."""

import argparse
import json

from megatron_ttrace.jobs import flags, script_patch
from megatron_ttrace.trace.errors import ExitCode

SUMMARY = "add the --ttrace flag to a Megatron-LM checkout's pretrain_gpt.py"
DESCRIPTION = (
    "Add --ttrace to pretrain_gpt.py of a Megatron-LM checkout. "
    "Nothing below megatron/ is changed, and --reverse restores every byte."
    " 'ttrace check' does not need the patch."
)
EPILOG = """\
example:
  ttrace patch ~/Megatron-LM
  torchrun --nproc-per-node 4 ~/Megatron-LM/pretrain_gpt.py <Megatron arguments> --ttrace
  ttrace patch ~/Megatron-LM --reverse
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument(
        "checkout", metavar="CHECKOUT", type=flags.path, help="a clone of Megatron-LM"
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="only show whether the patch applies")
    action.add_argument("--reverse", action="store_true", help="remove the flag again")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Apply the patch, reverse it, or only show its state.

    Raises ``TTraceError`` when CHECKOUT is not one, is of another release, or a line is in the way.
    """
    checkout = script_patch.find(args.checkout)
    wanted = script_patch.unpatched(checkout) if args.reverse else script_patch.patched(checkout)
    changed = False if args.check else script_patch.write(checkout, wanted)
    if args.check:
        outcome = "is patched" if checkout.applied else "is not patched; the patch applies"
    elif args.reverse:
        outcome = "the patch was removed" if changed else "was not patched; nothing to do"
    elif changed:
        added = len(checkout.patch.after) - len(checkout.patch.before)
        outcome = f"patched, {added} lines added"
    else:
        outcome = "was already patched; nothing to do"
    if args.json:
        answer = {
            "script": str(checkout.script),
            "version": checkout.version,
            "patch": checkout.patch_file.name,
            "applied": checkout.applied if args.check else not args.reverse,
            "changed": changed,
        }
        print(json.dumps(answer))
    else:
        print(f"{checkout.script} (Megatron-LM {checkout.version}): {outcome}")
    return ExitCode.EQUIVALENT
