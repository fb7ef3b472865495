# SPDX-License-Identifier: Apache-2.0
"""A reference's layout is checked itself before it is used: against one device, on a shrunk job.

The shrunk job has the same options and the same axes, and sizes that fit one device. Only if it is
equivalent is the reference made; how it divided each tensor is how the reference divides it
(``compare/sharding.py``).
"""

import shlex
import sys

from megatron_ttrace.compare import sharding
from megatron_ttrace.jobs import argv
from megatron_ttrace.jobs.commands.command_line import Command
from megatron_ttrace.jobs.processes.child import environment_of, run_subprocess
from megatron_ttrace.jobs.processes.logs import how_it_ended, reason_of
from megatron_ttrace.jobs.processes.progress import say
from megatron_ttrace.jobs.provenance import SHRUNK
from megatron_ttrace.jobs.reference_layout import Layout
from megatron_ttrace.jobs.settings import Settings, checking
from megatron_ttrace.jobs.shrink import documents, plan
from megatron_ttrace.jobs.shrink.command_flags import CommandFlags
from megatron_ttrace.mcore.options.decisions import QUIET, SINGLE_DEVICE, SINGLE_DEVICE_VALUES
from megatron_ttrace.trace import cleaning, owned, shared
from megatron_ttrace.trace.errors import ExitCode, TTraceError
from megatron_ttrace.trace.store import TraceReader

FOLDER = "layout"
"""Where the check of the layout is written, in the directory of the run."""
_LOG = "layout.log"


def checked(layout: Layout, settings: Settings) -> sharding.Divided:
    """Check a layout against one device; returns by how much it divides each tensor.

    Raises:
        TTraceError: unless it is equivalent there.
    """
    flag = f'--ttrace-reference-layout "{layout}"'
    shrunk = plan.as_it_is(_command(layout, settings))
    if shrunk.lost:
        raise TTraceError(
            f"{flag}: the layout cannot be checked on a shrunk job, which lacks: "
            + "; ".join(shrunk.lost)
        )
    home, log = settings.directory / FOLDER, settings.directory / _LOG
    prefix = home.with_name(f"{FOLDER}-data") / "text"
    job = shrunk.jobs[0]
    documents.write(prefix, job.arguments)
    script = shrunk.command.script
    data = documents.arguments(script, prefix, job.arguments)
    check = Settings(
        directory=home,
        save_candidate=True,
        wandb=False,
        device=settings.device,
        init=settings.init,
        timeout=settings.timeout,
    )
    words = checking(script, [*job.arguments, *data], layout.ranks, check)
    say(
        f"checking the reference's layout ({layout}) against one device, on a shrunk job "
        f"(log: {log})"
    )
    code = run_subprocess(
        [sys.executable, "-m", "megatron_ttrace", *words],
        {**_environment(), SHRUNK: shrunk.stands_for()},
        log,
        settings.timeout,
    )
    if code == ExitCode.DIVERGED:
        raise TTraceError(
            f"{flag}: on a shrunk job this layout is not equivalent to one device, so it cannot be "
            f"a reference (report: {home / 'report.html'})"
        )
    if code:
        why = reason_of(log) or how_it_ended(code)
        raise TTraceError(f"{flag}: could not be checked on a shrunk job: {why} (log: {log})")
    divided = sharding.divided(TraceReader(home / "candidate"))
    cleaning.remove_tensors(home, own=True)
    owned.discard(prefix.parent)
    return divided


def _command(layout: Layout, settings: Settings) -> Command:
    """The reference's own command: the candidate's with another layout."""
    words = []
    arguments = CommandFlags.parse([*argv.theirs(), *shlex.split(settings.reference_args)])
    for flag in arguments.flags:
        if flag.option not in SINGLE_DEVICE and flag.option not in QUIET:
            instead = SINGLE_DEVICE_VALUES.get((flag.option or "", " ".join(flag.values)))
            words += [flag.name, instead] if instead else flag.words()
    words += layout.words(experts=arguments.has("num_experts"))
    return Command(sys.argv[0], tuple(words), ranks=layout.ranks)


def _environment() -> dict[str, str]:
    """That of a user's shell: without what a launcher sets, or a check for its own ranks."""
    removed = (shared.VARIABLE, "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in environment_of(1, {}).items() if name not in removed}
