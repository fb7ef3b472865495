# SPDX-License-Identifier: Apache-2.0
"""``ttrace eval growth``: how tolerances grow with the number of layers."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ttrace.cli import command
from megatron_ttrace.errors import ExitCode

if TYPE_CHECKING:
    from megatron_ttrace.evaluation.growth import Growth
    from megatron_ttrace.runtime.runner import Runner

K, C = 4.0, 1.03
"""Constants of the bound of theorem 5.3, as in Megatron's gradient test."""

_JOB = (
    "--hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 1 --lr 1e-3 --lr-warmup-iters 0 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 64 --eval-iters 0 "
    "--attention-dropout 0 --hidden-dropout 0 --transformer-impl local"
)
_EPILOG = """\
example:
  ttrace eval growth --layers 4,16,64 --svg growth-fp32.svg
  ttrace eval growth --layers 4,16 --bf16

A small model of each depth is run on one device and replayed with perturbations, as in every check.
Each row is the median tolerance of a layer's tensors. The bound is that of theorem 5.3,
k C^(L + 1 - l) epsilon.

exit code: 0, or 2 if a model could not be run
"""


def add_parser(subparsers: command.Subparsers) -> argparse.ArgumentParser:
    """Add the ``growth`` command."""
    parser = command.add(
        subparsers,
        "growth",
        run,
        summary="show how tolerances grow with the number of layers",
        description="Show how tolerances grow with depth, compared with the bound of theorem 5.3.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--layers",
        type=command.numbers(1),
        default=(4, 16, 64),
        metavar="N[,N...]",
        help="numbers of layers",
    )
    parser.add_argument("--bf16", action="store_true", help="train in bf16 instead of fp32")
    parser.add_argument(
        "--init", default="reveal", choices=("reveal", "megatron"), help="start values"
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write a plot to FILE")
    command.add_directory(parser, "ttrace-out/growth")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def run(args: argparse.Namespace) -> int:
    """Run a model of each depth, tabulate, draw."""
    from megatron_ttrace.runtime.runner import NO_WANDB, Runner

    command.require_writable("--svg", args.svg)
    runner = Runner(args.directory, flags=(NO_WANDB, "--ttrace-init", args.init), shares=False)
    panels = []
    for layers in args.layers:
        print(f"{layers} layers", file=sys.stderr, flush=True)
        panels.append(_measure(args, layers, runner))
    if args.json:
        print(json.dumps([_described(grown) for grown in panels], indent=1))
    else:
        _show(panels)
    if args.svg:
        from megatron_ttrace.evaluation.growth import svg

        dtype = "bf16" if args.bf16 else "fp32"
        args.svg.write_text(svg(panels, f"tolerance over depth, {dtype}", (K, C)), "utf-8")
    return ExitCode.EQUIVALENT


def _measure(args: argparse.Namespace, layers: int, runner: Runner) -> Growth:
    from megatron_ttrace.compare import tolerance
    from megatron_ttrace.evaluation.growth import growth
    from megatron_ttrace.runtime.runner import Case
    from megatron_ttrace.trace.store import TraceReader

    name = f"{layers}-{'bf16' if args.bf16 else 'fp32'}-{args.init}"
    words = f"{_JOB} --num-layers {layers} {'--bf16' if args.bf16 else ''}".split()
    checked = runner.run(Case(name=name, arguments=tuple(words)))
    reference = TraceReader(checked.job.directory / "reference")
    epsilon = float(reference.meta["epsilon"])
    return growth(reference, tolerance.of_reference(reference), layers, epsilon)


def _described(grown: Growth) -> dict[str, Any]:
    return {
        "layers": grown.layers,
        "epsilon": grown.epsilon,
        "tolerances": {name: list(values) for name, values in grown.by_layer.items()},
        "rates": {name: grown.rate(name) for name in grown.by_layer},
        "bound": list(grown.bound(K, C)),
    }


def _show(panels: list[Growth]) -> None:
    print(
        f"{'layers':>6} {'of':<21} {'first layer':>11} {'last layer':>11} {'a layer':>8} "
        f"{'theorem 5.3: first':>19} {'last':>9}"
    )
    for grown in panels:
        bound = grown.bound(K, C)
        for name, values in grown.by_layer.items():
            print(
                f"{grown.layers:>6} {name:<21} {values[0]:>11.2e} {values[-1]:>11.2e} "
                f"{'x' + format(grown.rate(name), '.3f'):>8} {bound[0]:>19.2e} {bound[-1]:>9.2e}"
            )
