# SPDX-License-Identifier: Apache-2.0
"""The runs of which ``ttrace resume`` compares the states, made from one training command.

One run trains without interruption and saves once; the others restart from what it saved, in the
same layout or in others. All have the job's own options for saving and loading, and the same
schedules. Where they write is ours.
"""

import dataclasses
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron_ttrace.jobs.settings import split
from megatron_ttrace.jobs.shrink.given import Given
from megatron_ttrace.mcore.checkpoints.loading import TRACKER
from megatron_ttrace.mcore.options.decisions import SILENT
from megatron_ttrace.trace import small_files
from megatron_ttrace.trace.errors import TTraceError
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
_NPROC = "--nproc-per-node"
DIVISIBLE_BY = 128
"""Megatron's default of ``--make-vocab-size-divisible-by``."""


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
    """The runs of a command.

    Args:
        arguments: of the training script, without flags of ours.
        nproc: number of ranks.
        steps: before the checkpoint.
        into: flags of other layouts, each as one text.
        folder: absolute; the checkpoint is saved below it.

    Raises:
        TTraceError: for a layout whose flags are none.
    """
    given = Given.parse(arguments)
    notices = []
    if unused := [flag.name for flag in given.flags if flag.option in (*_SAVING, *SILENT)]:
        notices.append(f"not used: {', '.join(unused)} (this command saves in {folder})")
    left_out = [*_SAVING]
    first, why = _first_iteration(given)
    if why:
        left_out += ["load", "ckpt_step"]
        notices.append(why)
    elif first:
        notices.append(f"the uninterrupted run starts from --load {given.text('load')}")
    common, lengthened = _long_enough(_without(given, left_out), given, first + steps + AFTER)
    notices += lengthened
    checkpoint = str(folder / CHECKPOINT)
    saving = [*common, "--save", checkpoint, "--save-interval", str(steps)]
    if lengthened and first and not given.has(_FROM_CHECKPOINT):
        # Megatron refuses a checkpoint with the schedules of a shorter job.
        saving.append(_FROM_JOB)
    again = [*_without(Given.parse(common), _STARTING), "--load", checkpoint]
    order = Order(steps=AFTER)
    restarted = Run("restarted", tuple(again), nproc, order)
    return Plan(
        Run(FIRST, tuple(saving), nproc, Order(steps=steps + AFTER, save_after=steps)),
        restarted,
        dataclasses.replace(restarted, name="perturbed", order=Order(steps=AFTER, seed=SEED)),
        tuple(_into(restarted, text, number) for number, text in enumerate(into, 1)),
        tuple(notices),
    )


def _without(given: Given, options: Iterable[str]) -> list[str]:
    left_out = set(options)
    return [word for flag in given.flags if flag.option not in left_out for word in flag.words()]


def _first_iteration(given: Given) -> tuple[int, str]:
    """The iteration that the command starts from, and why its ``--load`` is left out, if it is."""
    if not given.has("load"):
        return 0, ""
    load = given.text("load")
    tracker = Path(load, TRACKER)
    if not tracker.is_file():
        return 0, f"not used: --load {load} (it holds no checkpoint)"
    if given.has("finetune"):
        return 0, ""
    try:
        text = given.text("ckpt_step") or small_files.text(tracker).strip()
    except (OSError, ValueError) as error:
        raise TTraceError(f"{tracker} cannot be read: {error}") from error
    return int(text) if text.isdecimal() else 0, ""


def _long_enough(words: list[str], given: Given, steps: int) -> tuple[list[str], list[str]]:
    """The same arguments, with which the job trains for at least so many steps."""
    samples = steps * given.integer("global_batch_size")
    for option, needed in (("train_iters", steps), ("train_samples", samples)):
        if given.has(option) and given.integer(option) < needed:
            flag = f"--{option.replace('_', '-')}"
            notice = (
                f"{flag} {needed} instead of {given.text(option)}: this command needs the steps"
            )
            return [*words, flag, str(needed)], [notice]
    return words, []


def _into(restarted: Run, text: str, number: int) -> Run:
    """The same restart in another layout."""
    try:
        words = shlex.split(text)
        Given.parse(words)
    except (ValueError, TTraceError) as error:
        raise TTraceError(f"--into {text!a}: {error}") from error
    nproc = restarted.nproc
    if _NPROC in words[:-1]:
        at = words.index(_NPROC)
        if not words[at + 1].isdecimal() or not int(words[at + 1]):
            raise TTraceError(f"--into {text!a}: {_NPROC} needs a number")
        nproc = int(words[at + 1])
        words = [*words[:at], *words[at + 2 :]]
    if split(words)[1] != words or not all(Given.parse(words).flags):
        raise TTraceError(f"--into {text!a}: give flags of the script, and {_NPROC}")
    words += _padding(Given.parse(restarted.arguments), Given.parse(words))
    name = f"{INTO}{number}"
    return dataclasses.replace(
        restarted, name=name, arguments=(*restarted.arguments, *words), nproc=nproc, layout=text
    )


def _padding(base: Given, into: Given) -> list[str]:
    """The flag with which the vocabulary is padded as in the job's own layout, if one is needed.

    Megatron pads it to a multiple of ``--make-vocab-size-divisible-by`` times the tensor-parallel
    size (megatron/training/vocab_utils.py), and the softmax runs over padded rows, too.
    """
    tensor, divisible = "tensor_model_parallel_size", "make_vocab_size_divisible_by"
    if into.has(divisible) or not into.has(tensor):
        return []
    multiple = base.integer(divisible, DIVISIBLE_BY) * base.integer(tensor, 1)
    ranks = into.integer(tensor, 1)
    if ranks == base.integer(tensor, 1) or ranks < 1 or multiple % ranks:
        return []
    return ["--make-vocab-size-divisible-by", str(multiple // ranks)]
