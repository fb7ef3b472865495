# SPDX-License-Identifier: Apache-2.0
"""From a large command to small ones, with an account of every change."""

import dataclasses
from collections.abc import Sequence

from megatron_ttrace.jobs import script as scripts
from megatron_ttrace.jobs.commands.command_line import Command
from megatron_ttrace.jobs.flags import DEFAULT_RANKS
from megatron_ttrace.jobs.shrink import axes, documents
from megatron_ttrace.jobs.shrink.axes import Axes
from megatron_ttrace.jobs.shrink.case import Case, Change
from megatron_ttrace.jobs.shrink.command_flags import CommandFlags, Flag
from megatron_ttrace.jobs.shrink.rules import RULES
from megatron_ttrace.mcore.options.decisions import REFUSED
from megatron_ttrace.mcore.options.roles import ROLES, Role
from megatron_ttrace.trace.errors import TTraceError

DROPPED = {
    Role.LENGTH: "one iteration is checked",
    Role.INPUT: "own data and tokens instead",
    Role.CHECKPOINT: "nothing is loaded or saved",
    Role.OPERATION: "nothing is logged, profiled or restarted",
    Role.FOREIGN: "not read by a training run",
}
"""Roles whose options a small job does without, and why."""

_LOST = {
    "load": "the weights of the checkpoint: generated ones instead",
    "pretrained_checkpoint": "the weights of the checkpoint: generated ones instead",
    "moe_use_upcycling": "upcycling a dense checkpoint",
    "heterogeneous_layers_config_path": "layers of different shapes",
    "logits_load_dir": "the distillation loss: the teacher's logits are not there",
}
"""Dropped options without which the small job computes something else."""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One line of the account: a flag with its old values (empty: not given) and its new ones.

    ``now`` is ``None`` where it is gone.
    """

    flag: str
    was: str
    now: str | None
    why: str


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One small job: its parallel axes, and the script's arguments without those of its data."""

    axes: Axes
    arguments: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What a command becomes.

    Attributes:
        command: the large one.
        large: its axes.
        jobs: the small ones; several if one world does not hold all axes.
        rows: what changes in the first job.
        kept: flags that all jobs have as they were.
        lost: what no job does although the large one does.
    """

    command: Command
    large: Axes
    jobs: tuple[Job, ...]
    rows: tuple[Row, ...]
    kept: tuple[str, ...]
    lost: tuple[str, ...]

    def stands_for(self) -> str:
        """For the report of a small job: what it stands for."""
        large = self.command.ranks or self.large.ranks
        lost = f"; not kept: {'; '.join(self.lost)}" if self.lost else ""
        return f"this is a shrunk job, which stands for one with {large} ranks{lost}"


def shrink(command: Command, most: int = DEFAULT_RANKS) -> Plan:
    """The smallest jobs of at most ``most`` ranks that run the same code.

    Raises ``TTraceError`` as :func:`of_flags`, and when the job is one of Megatron-Bridge.
    """
    scripts.require_flags(command.script, "shrinking")
    return of_flags(command, most)


def of_flags(command: Command, most: int) -> Plan:
    """As :func:`shrink`, of a job whose arguments may be those that its configuration stands for.

    Raises ``TTraceError`` when they cannot be understood, or two axes do not fit ``most`` ranks.
    """
    flags = CommandFlags.parse(command.arguments)
    require_checkable(flags)
    large = axes.of_large(flags, command.ranks)
    smalls = axes.jobs(flags, large, most)
    first, *further = (_plan(command, flags, large, small) for small in smalls)
    spread, lost = large.spread(), list(first.lost)
    if not any(small.spread() == spread for small in smalls):
        names = ", ".join(spread)
        lost.append(f"all axes in one job ({names}): {len(smalls)} jobs have all pairs of them")
    short = [
        axis
        for axis in axes.FLAGS
        if axis not in axes.LONGER and axes.longer(large, axis)
        if not any(axes.longer(small, axis) for small in smalls)
    ]
    if short:
        names = ", ".join(short)
        lost.append(f"more than two ranks along {names}: of two, the next is also the previous one")
    for axis, what in axes.LONGER.items():
        having = {small.spread() for small in smalls if axes.longer(small, axis)}
        if axes.longer(large, axis) and having <= {(axis,)} - {spread}:
            alone = "one job has them alone" if having else f"no job of {most} ranks has any"
            lost.append(f"{what} with the other axes: {alone}")
    longer = [axis for axis in axes.LONGER if axes.longer(smalls[0], axis)]
    why = ", ".join(["2 per axis", *(f"{getattr(smalls[0], axis)} for {axis}" for axis in longer)])
    ranks = Row("ranks", str(command.ranks or "not said"), str(smalls[0].ranks), why)
    jobs = (*first.jobs, *(job for plan in further for job in plan.jobs))
    return dataclasses.replace(first, jobs=jobs, rows=(ranks, *first.rows), lost=tuple(lost))


def with_axes(command: Command, kept: tuple[str, ...], most: int = DEFAULT_RANKS) -> Job:
    """The small job that has only these of the command's axes.

    Raises ``TTraceError`` when the axes do not divide the ranks, or need more than ``most``.
    """
    flags = CommandFlags.parse(command.arguments)
    large = axes.of_large(flags, command.ranks)
    small = axes.of_small(flags, large, kept)
    if not small.edp or small.ranks > most:
        raise TTraceError(f"{', '.join(kept)}: do not fit {most} ranks")
    return _plan(command, flags, large, small).jobs[0]


def as_it_is(command: Command) -> Plan:
    """The one small job with all axes of the command as large as they are.

    Raises ``TTraceError`` when the arguments cannot be understood.
    """
    flags = CommandFlags.parse(command.arguments)
    large = axes.of_large(flags, command.ranks)
    return _plan(command, flags, large, large)


def require_checkable(flags: CommandFlags) -> None:
    """Raise ``TTraceError``, naming the flag, for what no check can do."""
    for flag in flags.flags:
        if why := REFUSED.get(flag.option or ""):
            raise TTraceError(f"{flag.name}: {why}")
    if flags.has("use_checkpoint_args"):
        raise TTraceError(
            "--use-checkpoint-args: the model's arguments are in the checkpoint; give them as flags"
        )


def _plan(command: Command, flags: CommandFlags, large: Axes, small: Axes) -> Plan:
    """The plan of one small job."""
    own_data = not documents.suits(command.script)
    case = Case(flags, large, small, own_data, documents.can_chat())
    changes: dict[str, Change] = {}
    for rule in RULES:
        for change in rule(case):
            earlier = changes.get(change.option)
            # What goes with its axis stays away.
            if earlier is None or earlier.values is not None:
                changes[change.option] = change
    words: list[str] = []
    rows: list[Row] = []
    kept: list[str] = []
    lost: list[str] = []
    gone: dict[Role, list[Flag]] = {}
    for flag in flags.flags:
        option = flag.option or ""
        becomes = changes.pop(option, None)
        known = ROLES.get(option)
        if becomes is not None and becomes.values != flag.values:
            rows.append(_row(flag.name, flag.values, becomes))
            if becomes.lost:
                lost.append(f"{flag.name}: {becomes.why}")
            if becomes.values is not None:
                words += [flag.name, *becomes.values]
        elif (
            becomes is None
            and known is not None
            and known in DROPPED
            and not (own_data and known is Role.INPUT)
        ):
            gone.setdefault(known, []).append(flag)
            if option in _LOST:
                lost.append(f"{flag.name}: {_LOST[option]}")
        else:
            kept.append(str(flag))
            words += flag.words()
    for role, dropped in gone.items():
        rows.append(Row(_names(dropped), "", None, DROPPED[role]))
    for change in changes.values():
        name = "--" + change.option.replace("_", "-")
        if change.values is not None:
            rows.append(_row(name, (), change))
            words += [name, *change.values]
    jobs = (Job(small, tuple(words)),)
    return Plan(command, large, jobs, tuple(rows), tuple(kept), tuple(lost))


def _row(name: str, values: Sequence[str], change: Change) -> Row:
    now = None if change.values is None else " ".join(change.values)
    return Row(name, " ".join(values), now, change.why)


def _names(flags: Sequence[Flag]) -> str:
    names = list(dict.fromkeys(flag.name for flag in flags))
    if len(names) <= 2:
        return ", ".join(names)
    return f"{names[0]} and {len(names) - 1} more"
