# SPDX-License-Identifier: Apache-2.0
"""The runs whose states ``ttrace resume`` compares, made from one training command.

One run trains without interruption and saves once; the others restart from what it saved, in the
same layout or in others. All have the job's own options for saving and loading, and the same
schedules. Where they write is ours.
"""

import dataclasses
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron_ttrace.jobs.flags import Parser, integer
from megatron_ttrace.jobs.settings import split
from megatron_ttrace.jobs.shrink.axes import OPTIONS
from megatron_ttrace.jobs.shrink.command_flags import CommandFlags
from megatron_ttrace.mcore.checkpoints.loading import TRACKER
from megatron_ttrace.mcore.options.decisions import SILENT
from megatron_ttrace.trace import small_files
from megatron_ttrace.trace.errors import TTraceError, reported
from megatron_ttrace.trace.recorded import FOLDER, Order

AFTER = 2
"""Steps after the restart."""
FIRST = "uninterrupted"
CHECKPOINT = Path(FIRST, FOLDER, "checkpoint")
"""The folder with the checkpoint, below the command's directory."""
INTO = "into-"
"""Beginning of the names of runs in other layouts."""
SEED = 1
"""Of the run that is perturbed."""

_SAVING = ("save", "save_interval", "save_retain_interval")
"""Options of the job that this command replaces."""
_STARTING = ("load", "ckpt_step", "pretrained_checkpoint", "finetune", "moe_use_upcycling")
"""Options of the uninterrupted run alone."""
_FROM_CHECKPOINT = "use_checkpoint_opt_param_scheduler"
_FROM_JOB = "--override-opt_param-scheduler"
"""Options that say whose schedules a job follows that starts from a checkpoint."""
_LAYOUT = "use_mp_args_from_checkpoint_args"
"""Option with which Megatron takes the layout of what it loads."""
_NPROC = "--nproc-per-node"


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One training run of ``nproc`` ranks in the directory ``name``; ``order`` is what it does.

    ``layout``: the flags by which its layout is another one; empty for the job's own.
    """

    name: str
    arguments: tuple[str, ...]
    nproc: int
    order: Order
    layout: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """The runs of a command, in the order in which they are made, and how they differ from it.

    ``uninterrupted`` trains on; ``restarted`` is in the same layout, ``perturbed`` the same once
    more, for tolerances; ``into`` is in other layouts.
    """

    uninterrupted: Run
    restarted: Run
    perturbed: Run
    into: tuple[Run, ...]
    notices: tuple[str, ...]


def plan(
    arguments: Sequence[str],
    nproc: int,
    steps: int,
    into: Sequence[str],
    folder: Path,
) -> Plan:
    """The runs of a command, whose ``arguments`` have no flags of ours.

    ``steps`` are those before the checkpoint, which is saved below ``folder`` (absolute); ``into``
    has the flags of other layouts, each as one text. Raises ``TTraceError`` if they are not flags.
    """
    flags = CommandFlags.parse(arguments)
    if into and flags.has(_LAYOUT):
        option = _LAYOUT.replace("_", "-")
        raise TTraceError(f"--{option}: the checkpoint has the layout: omit that, or --into")
    notices = []
    if unused := [flag.name for flag in flags.flags if flag.option in (*_SAVING, *SILENT)]:
        notices.append(f"not used: {', '.join(unused)} (this command saves in {folder})")
    left_out = [*_SAVING]
    first, why = _first_iteration(flags)
    if why:
        left_out += ["load", "ckpt_step"]
        notices.append(why)
    elif first:
        notices.append(f"the uninterrupted run starts from --load {flags.text('load')}")
    common, lengthened = _long_enough(_without(flags, left_out), flags, first + steps + AFTER)
    notices += lengthened
    checkpoint = str(folder / CHECKPOINT)
    saving = [*common, "--save", checkpoint, "--save-interval", str(steps)]
    if lengthened and first and not flags.has(_FROM_CHECKPOINT):
        # Megatron refuses a checkpoint with the schedules of a shorter job.
        saving.append(_FROM_JOB)
    again = [*_without(CommandFlags.parse(common), _STARTING), "--load", checkpoint]
    order = Order(steps=AFTER)
    restarted = Run("restarted", tuple(again), nproc, order)
    return Plan(
        Run(FIRST, tuple(saving), nproc, Order(steps=steps + AFTER, save_after=steps)),
        restarted,
        dataclasses.replace(restarted, name="perturbed", order=Order(steps=AFTER, seed=SEED)),
        tuple(_into(restarted, text, number) for number, text in enumerate(into, 1)),
        tuple(notices),
    )


def elsewhere(plan: Plan) -> Run | None:
    """A plan's restart on one device; ``None`` if it is on one.

    Of the flags of a layout only the sizes are changed, so Megatron may refuse it.
    """
    if plan.restarted.nproc == 1:
        return None
    flags = CommandFlags.parse(plan.restarted.arguments)
    sizes = [option for option in OPTIONS.values() if flags.has(option)]
    words = [f"{_NPROC} 1", *(f"--{option.replace('_', '-')} 1" for option in sizes)]
    return _into(plan.restarted, " ".join(words), len(plan.into) + 1)


def _without(flags: CommandFlags, options: Iterable[str]) -> list[str]:
    left_out = set(options)
    return [word for flag in flags.flags if flag.option not in left_out for word in flag.words()]


def _first_iteration(flags: CommandFlags) -> tuple[int, str]:
    """The iteration that the command starts from, and why its ``--load`` is left out, if it is."""
    if not flags.has("load"):
        return 0, ""
    load = flags.text("load")
    tracker = Path(load, TRACKER)
    if not tracker.is_file():
        return 0, f"not used: --load {load} (it has no {TRACKER})"
    if flags.has("finetune"):
        return 0, ""
    with reported(f"{tracker} cannot be read", OSError, ValueError):
        text = flags.text("ckpt_step") or small_files.text(tracker).strip()
    return int(text) if text.isdecimal() else 0, ""


def _long_enough(words: list[str], flags: CommandFlags, steps: int) -> tuple[list[str], list[str]]:
    """The same arguments, with which the job trains for at least so many steps."""
    samples = steps * flags.integer("global_batch_size")
    for option, needed in (("train_iters", steps), ("train_samples", samples)):
        if flags.has(option) and flags.integer(option) < needed:
            flag = f"--{option.replace('_', '-')}"
            notice = (
                f"{flag} {needed} instead of {flags.text(option)}: this command needs the steps"
            )
            return [*words, flag, str(needed)], [notice]
    return words, []


def _into(restarted: Run, text: str, number: int) -> Run:
    """The same restart in another layout."""
    usage = f"give flags of the script, such as --tensor-model-parallel-size 1, and {_NPROC} N"
    parser = Parser(prog="ttrace resume", add_help=False, allow_abbrev=False)
    parser.add_argument(_NPROC, dest="nproc", type=integer(1), default=restarted.nproc)
    try:
        args, words = parser.parse_known_args(shlex.split(text))
        CommandFlags.parse(words)
        if split(words)[1] != words:
            raise TTraceError("the flags of a check")
    except (ValueError, TTraceError) as error:
        raise TTraceError(f"--into {text!a}: {usage}") from error
    if not CommandFlags.parse(words).has("make_vocab_size_divisible_by"):
        base = CommandFlags.parse(restarted.arguments)
        words += CommandFlags.parse([*restarted.arguments, *words]).padding(base.padded_multiple())
    name = f"{INTO}{number}"
    return dataclasses.replace(
        restarted,
        name=name,
        arguments=(*restarted.arguments, *words),
        nproc=args.nproc,
        layout=text,
    )
