# SPDX-License-Identifier: Apache-2.0
"""``ttrace checkpoint``: whether two checkpoints hold the same state."""

import argparse
import json
from collections import Counter, defaultdict

from megatron_ttrace.jobs import flags
from megatron_ttrace.trace.sanitise import NOTE_LIMIT, clean

SUMMARY = "compare the state of two checkpoints, in any layouts"
EPILOG = """\
examples:
  ttrace checkpoint checkpoints/tp8 checkpoints/pp4
  ttrace checkpoint --weights-only before/iter_0001000 converted/iter_0001000
  ttrace checkpoint Qwen3-8B converted/qwen3-8b

Compares weights, main weights, moments and other optimizer state, buffers, and the numbers that
training continues from (iteration, consumed samples, schedule, parameter groups), tensor by tensor
and bit by bit; if dtypes differ, after rounding to the narrower one. Formats: torch_dist of any
layout, fsdp_dtensor, and safetensors, which hold weights only. The older format torch must be
converted first. Optimizer state in the default dp_reshardable form depends on the layout and is
compared only with that of the same layout. torch and Megatron load distributed checkpoints, as they
do in training: only compare those that you would train from.

If A or B is a model of Hugging Face (config.json and safetensors), the weights of B must be what a
conversion of A gives. An error of the conversion is named if it explains all values of a tensor.

exit code: 0 the same, 1 different, 2 could not compare everything
"""
_SHOWN = 40
_TITLES = ("the {} are the same", "the {} differ", "could not compare everything")
"""By exit code."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    for name in ("A", "B"):
        help = "directory of a checkpoint, or of one iteration of it"
        parser.add_argument(name.lower(), type=flags.path, metavar=name, help=help)
    help = "compare weights and buffers, not optimizer state and numbers"
    parser.add_argument("--weights-only", action="store_true", help=help)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Compare, and list what is not the same."""
    from megatron_ttrace.saved.huggingface.converted import compare_any
    from megatron_ttrace.trace.errors import ExitCode
    from megatron_ttrace.trace.states import State

    compared = compare_any(args.a, args.b, weights_only=args.weights_only)
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for tensor in compared.tensors:
        counts[tensor.state][tensor.same] += 1
    if args.json:
        weights = [tensor for tensor in compared.tensors if tensor.state == State.WEIGHT]
        optimizer = [tensor for tensor in compared.tensors if tensor.state != State.WEIGHT]
        answer = {
            "same": compared.code is ExitCode.EQUIVALENT,
            "counts": sum(counts.values(), Counter[str]()),
            "weights": [tensor.to_json() for tensor in weights],
            "optimizer": [tensor.to_json() for tensor in optimizer],
            "numbers": [number.to_json() for number in compared.numbers],
            "notices": compared.notices,
        }
        print(json.dumps(answer, indent=1))
        return compared.code
    title = _TITLES[compared.code].format("weights" if compared.weights_only else "checkpoints")
    print(f"ttrace: {title}")
    for state, count in counts.items():
        print(
            f"  {clean(state)}: {', '.join(f'{number} {same}' for same, number in count.items())}"
        )
    causes = Counter(str(tensor.cause) for tensor in compared.tensors if tensor.cause)
    for cause, number in causes.most_common():
        print(f"  {number} of the different ones: {cause}")
    different = [tensor for tensor in compared.tensors if not tensor.same.is_same]
    lines = [f"{clean(n.name)}: {_shown(n.a)} in A, {_shown(n.b)} in B" for n in compared.numbers]
    for tensor in different:
        error = "" if tensor.rel_err is None else f", relative error {tensor.rel_err:.3g}"
        note = f" ({clean(tensor.note, NOTE_LIMIT)})" if tensor.note else ""
        why = f": {tensor.cause}" if tensor.cause else ""
        state = "" if tensor.state == State.WEIGHT else f"{tensor.state} of "
        lines.append(f"{clean(state + tensor.name)}: {tensor.same}{error}{why}{note}")
    for line in lines[:_SHOWN]:
        print(f"  {line}")
    if len(lines) > _SHOWN:
        print(f"  and {len(lines) - _SHOWN} more (--json lists all)")
    notes = (tensor.note for tensor in compared.tensors if tensor.same.is_same and tensor.note)
    for note in dict.fromkeys((*compared.notices, *notes)):
        print(f"  {clean(note, NOTE_LIMIT)}")
    return compared.code


def _shown(number: str | None) -> str:
    return "absent" if number is None else clean(number)
