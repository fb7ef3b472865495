# SPDX-License-Identifier: Apache-2.0
"""The Python API, which ``ttrace check`` and ``ttrace compare`` call too.

Importing this module imports neither torch nor Megatron.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ttrace.jobs import flags, provenance, reference_layout
from megatron_ttrace.jobs import script as scripts
from megatron_ttrace.jobs.processes import signals
from megatron_ttrace.jobs.settings import (
    DEFAULT_ALLOW_UNCHECKED,
    DEFAULT_TIMEOUT,
    Settings,
    checking,
    split,
)
from megatron_ttrace.trace.errors import TTraceError, reported
from megatron_ttrace.trace.records import Culprit, Result, Run, Summary, Verdict

if TYPE_CHECKING:
    from megatron_ttrace.jobs import job as jobs
    from megatron_ttrace.saved.difference import Review
    from megatron_ttrace.saved.huggingface.comparison import Compared
    from megatron_ttrace.trace.store import TraceReader

__all__ = ["Report", "check", "compare", "diff", "load_report", "run_check"]

PathLike = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The result of a check: the answer, one verdict per tensor, and where the files are.

    Attributes:
        summary: the content of ``summary.json``: counts, culprits, notices, layout, versions,
            timings, and the run that it belongs to.
        verdicts: the content of ``verdicts.jsonl``, in the order in which the reference computed
            the tensors.
        directory: where ``summary.json``, ``verdicts.jsonl`` and ``report.html`` are.
        isolating: the command that checks the same job with every module isolated, as words; empty
            if the report was read from files or made from saved traces.
        isolated: the report of that check, made at once if a culprit has no known cause.
    """

    summary: Summary
    verdicts: tuple[Verdict, ...]
    directory: Path
    isolating: tuple[str, ...] = ()
    isolated: Report | None = None

    @property
    def verdict(self) -> Result:
        """The answer: equivalent, diverged, or could not check."""
        return self.summary.verdict

    @property
    def is_equivalent(self) -> bool:
        """Whether the run computes what one device would. False if it could not be checked."""
        return self.verdict is Result.EQUIVALENT

    @property
    def culprits(self) -> tuple[Culprit, ...]:
        """The modules in which errors originate, the first one first; empty unless diverged."""
        return self.summary.culprits

    @property
    def run(self) -> Run | None:
        """Command, script, Megatron, host and date of the run; ``None`` if not recorded."""
        return self.summary.run

    def failures(self) -> list[Verdict]:
        """The verdicts that make a run diverge, in execution order."""
        return [verdict for verdict in self.verdicts if verdict.verdict.is_failure]


def check(
    script: PathLike,
    arguments: Sequence[str] = (),
    *,
    nproc_per_node: int = 1,
    directory: PathLike = "ttrace-out",
    timeout: float = DEFAULT_TIMEOUT,
    allow_unchecked: float = DEFAULT_ALLOW_UNCHECKED,
    environment: Mapping[str, str] | None = None,
    fork: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Run a Megatron training script on this machine and check it, as ``ttrace check`` does.

    The script runs exactly as ``python SCRIPT`` would in this directory and environment, once per
    rank, up to the last traced iteration. If no reference is given, one is made first.

    Args:
        script: a Megatron training script, for instance ``pretrain_gpt.py`` of a checkout. It need
            not call :func:`enable`.
        arguments: the script's arguments. Any ``--ttrace-*`` flag may be among them and takes
            precedence over the parameters below.
        nproc_per_node: number of ranks, all on this machine.
        directory: ``--ttrace-dir``. Files of an earlier check are removed, except its reference.
        timeout: seconds after which a reference run, or a rank without output, counts as lost.
        allow_unchecked: share of tensors, from 0 to 1, that may be unchecked in an equivalent run.
        environment: variables added to each rank's environment.
        fork: without a GPU, import Megatron into this process once and fork the ranks from it. The
            process then has Megatron's CPU backend activated, and must not run threads of its own.
        progress: called with lines of text about the progress, at least every five seconds.

    Returns:
        The report. Its files are in ``directory``.

    Raises:
        TTraceError: when there is no report: a script that does not exist, a flag with a wrong
            value, a directory in use, a rank that crashed. The message says what to do.
    """
    place = Settings(directory=Path(directory))
    words = checking(script, arguments, nproc_per_node, place)
    recorded = {provenance.COMMAND: provenance.command_line(["ttrace", *words])}
    return run_check(
        Path(script),
        arguments,
        dataclasses.replace(place, timeout=timeout, allow_unchecked=allow_unchecked),
        nproc=nproc_per_node,
        environment={**recorded, **(environment or {})},
        fork=fork,
        say=progress,
    )


def compare(
    reference: PathLike,
    candidate: PathLike,
    *,
    output: PathLike | None = None,
    allow_unchecked: float = DEFAULT_ALLOW_UNCHECKED,
    wandb: bool = False,
    show: bool = False,
) -> Report:
    """Compare two saved traces without running anything, as ``ttrace compare`` does.

    Args:
        reference: directory of a reference's trace, ``DIR/reference`` of a check.
        candidate: directory of a candidate's trace, ``DIR/candidate`` of a check that ran with
            ``--ttrace-save-candidate``.
        output: where the report is written; by default the directory that holds ``candidate``.
        allow_unchecked: share of tensors, from 0 to 1, that may be unchecked in an equivalent run.
        wandb: whether to log the report to W&B too, online if a key is configured.
        show: whether to print the report.

    Returns:
        The report; its verdict is ``Result.COULD_NOT_CHECK`` if too many tensors are unchecked.

    Raises:
        TTraceError: when a trace is missing, damaged or of the other role, or when the report
            cannot be written.
    """
    from megatron_ttrace.saved import difference
    from megatron_ttrace.trace.store import TraceReader

    Settings(allow_unchecked=allow_unchecked).require_valid()
    theirs, ours = Path(reference), Path(candidate)
    trusted, tested = TraceReader(theirs), TraceReader(ours)
    for trace, role in ((trusted, "reference"), (tested, "candidate")):
        if trace.meta.get("role") != role:
            raise TTraceError(f"{trace.directory} is not a {role} trace: give REFERENCE CANDIDATE")
    if not tested.candidate.complete:
        raise TTraceError(f"{ours} holds failed tensors only: trace with --ttrace-save-candidate")
    difference.require_alike(
        difference.Side(directory=theirs, candidate=None, reference=trusted),
        difference.Side(directory=ours, candidate=tested, reference=None),
    )
    folder = Path(output if output is not None else os.path.normpath(ours / os.pardir))
    _require_no_trace(folder)
    return _compared(
        trusted,
        tested,
        folder,
        allow_unchecked=allow_unchecked,
        wandb=wandb,
        wandb_online=wandb,
        show=show,
    )


def diff(
    first: PathLike,
    second: PathLike,
    *,
    output: PathLike,
    known: PathLike | None = None,
    allow_unchecked: float = DEFAULT_ALLOW_UNCHECKED,
    wandb: bool = False,
    wandb_online: bool = False,
    show: bool = False,
) -> Report:
    """Compare two runs, both of which were kept, as ``ttrace diff`` does.

    Args:
        first: directory of ``ttrace record``, or of a check with ``--ttrace-save-candidate``, or of
            one of the traces in it. It takes the place of the reference. Or ``hf:`` and the path of
            a ``config.json``: ``second`` is compared with that model of ``transformers``.
        second: another one; with ``hf:``, the directory of any check.
        output: where the report is written.
        known: a TOML file with known differences, in addition to this package's own.
        allow_unchecked: share of tensors, from 0 to 1, that may be unchecked in an equivalent run.
        wandb: whether to log the report to W&B too.
        wandb_online: whether it may be sent there, if a key is configured.
        show: whether to print the report.

    Raises:
        TTraceError: when a trace is missing or damaged, or the two cannot be compared.
    """
    from megatron_ttrace.saved import difference
    from megatron_ttrace.saved import known as lists
    from megatron_ttrace.saved.huggingface import comparison as huggingface
    from megatron_ttrace.trace.store import TraceReader

    Settings(allow_unchecked=allow_unchecked).require_valid()
    folder = Path(output)
    _require_no_trace(folder)
    show_to = functools.partial(
        _compared,
        folder=folder,
        allow_unchecked=allow_unchecked,
        wandb=wandb,
        wandb_online=wandb_online,
        show=show,
    )
    listed = () if known is None else lists.read(Path(known))
    if huggingface.config_of(second) is not None:
        first, second = second, first
    if (config := huggingface.config_of(first)) is not None:
        reference = huggingface.open_reference(Path(second))
        with difference.aside(folder) as home:
            model = huggingface.Compared(config, reference, home, listed)
            return show_to(reference, TraceReader(home), review=model)
    sides = [difference.open_side(Path(place)) for place in (first, second)]
    trusted, tested = difference.in_order(*sides)
    assert tested.candidate is not None, "in_order requires a candidate"
    with difference.aside(folder) as home:
        with consistent(trusted.directory, tested.directory):
            left_out = difference.write(trusted, tested, home)
        all_known = (*lists.read(lists.OWN_LIST), *listed)
        review = difference.Review(trusted, tested, left_out, all_known)
        return show_to(
            TraceReader(home), tested.candidate, review=review, own_summary=tested.summary
        )


def is_model(text: object) -> bool:
    """Whether this names a model of ``transformers``; raises ``TTraceError`` if that cannot run."""
    from megatron_ttrace.saved.huggingface import comparison as huggingface

    if (config := huggingface.config_of(text)) is not None:
        huggingface.require(config)
    return config is not None


def _require_no_trace(folder: Path) -> None:
    """Refuse a directory for a report that is a trace: with other files in it, it is damaged."""
    from megatron_ttrace.trace.store import META

    if (folder / META).exists():
        raise TTraceError(f"{folder} holds a trace: choose another directory for the report")


def _compared(
    trusted: TraceReader,
    tested: TraceReader,
    folder: Path,
    *,
    allow_unchecked: float,
    wandb: bool,
    wandb_online: bool,
    show: bool,
    review: Review | Compared | None = None,
    own_summary: Summary | None = None,
) -> Report:
    """Judge a saved candidate and write the report to ``folder``."""
    from rich.console import Console

    from megatron_ttrace.compare import tolerance
    from megatron_ttrace.compare.gathered import of_ranks
    from megatron_ttrace.compare.offline import (
        config_of,
        counts_of,
        epsilon_of,
        measure_saved,
        meshes_of,
    )
    from megatron_ttrace.report import publish
    from megatron_ttrace.saved.conclusion import conclude
    from megatron_ttrace.trace import shared

    began = time.monotonic()
    theirs, ours = trusted.directory, tested.directory
    epsilon_of(trusted)
    meshes, ledger = meshes_of(tested), tested.candidate.ledger
    config = config_of(tested)
    if review is not None:
        # Neither run has a single device's order of sums.
        config = dataclasses.replace(config, arithmetic=None, reference=str(review.reference))
    with consistent(theirs, ours):
        summary, verdicts = conclude(
            trusted,
            tolerances := tolerance.of_reference(trusted),
            of_ranks(measure_saved(trusted, tested, tolerances)),
            candidate=ours,
            counts=counts_of(tested),
            mesh=meshes[0],
            config=config,
            timings={"measure": time.monotonic() - began},
            allow_unchecked=allow_unchecked,
            ledger=ledger,
            review=review or list,
            explains=review is None or review.explains,
        )
    if review is not None:
        notices = (*review.notices(), *summary.notices)
        both = {**summary.config, "against": review.layout()}
        asked = tuple(n for n in summary.not_exercised if n.what not in review.not_asked)
        summary = dataclasses.replace(summary, notices=notices, config=both, not_exercised=asked)
    elif layout := reference_layout.decoded(trusted.reference.layout):
        notices = (reference_layout.described(layout), *summary.notices)
        summary = dataclasses.replace(summary, notices=notices)
    if own_summary is not None:
        summary = dataclasses.replace(summary, run=own_summary.run, versions=own_summary.versions)
    run = tested.meta["run"]
    with shared.claim_report(folder, run):
        publish(
            summary,
            verdicts,
            folder,
            wandb=wandb,
            wandb_online=wandb_online,
            console=Console(quiet=not show),
            run_id=run,
            collectives=ledger.collectives,
        )
    return Report(summary=summary, verdicts=tuple(verdicts), directory=folder)


def rewritten(report: Report, summary: Summary) -> Report:
    """The same report with another summary, in its files too.

    Raises:
        TTraceError: when it cannot be written.
    """
    from rich.console import Console

    from megatron_ttrace.report import publish
    from megatron_ttrace.trace import files, shared

    run = files.run_of(report.directory)
    with shared.claim_report(report.directory, run, keeps=True):
        publish(
            summary,
            report.verdicts,
            report.directory,
            wandb=False,
            console=Console(quiet=True),
            run_id=run,
        )
    return dataclasses.replace(report, summary=summary)


def consistent(reference: Path, candidate: Path) -> AbstractContextManager[None]:
    """Report numbers of saved traces that are each in range but do not belong to one run."""
    what = f"{candidate} and {reference} contradict themselves or each other"
    return reported(what, ArithmeticError, ValueError, advice="run the traced job again")


def load_report(directory: PathLike) -> Report:
    """Read the report in the ``--ttrace-dir`` of a finished check, as ``ttrace report`` does.

    Raises:
        TTraceError: when a file is missing, damaged, foreign, or of another run than the others.
    """
    from megatron_ttrace.trace import files

    folder = Path(directory)
    summary, verdicts = files.load_report(folder)
    return Report(summary=summary, verdicts=tuple(verdicts), directory=folder)


def run_check(
    script: Path,
    arguments: Sequence[str],
    settings: Settings,
    *,
    nproc: int,
    environment: Mapping[str, str],
    fork: bool,
    say: Callable[[str], None] | None,
    settle: bool = True,
) -> Report:
    """Run a check to its end, for :func:`check` and ``ttrace check``.

    Flags of ours among ``arguments`` override ``settings``. ``settle``: check again, isolated,
    where the first check leaves doubt, or rounding hides too much.

    Raises:
        TTraceError: when there is no report.
    """
    if not 1 <= nproc <= flags.MOST_RANKS:
        raise TTraceError(f"--nproc-per-node {nproc}: give 1 to {flags.MOST_RANKS} ranks")
    settings, theirs = split(arguments, settings)
    settings = dataclasses.replace(settings, exit_after=False, role="candidate", overrides=None)
    # Nothing needs to be cleaned up yet, and imports swallow Ctrl-C.
    with signals.abrupt():
        from megatron_ttrace.jobs import job as jobs
        from megatron_ttrace.jobs.processes.progress import Progress
        from megatron_ttrace.trace import shared

    began = time.monotonic()
    shared.require_free(settings.directory)
    scripts.require(script)
    tell = say or (lambda line: None)
    progress = Progress(tell)
    if fork:
        progress(f"checking {script}: importing torch and Megatron")
        with progress.ticking():
            fork = jobs.prepare(settings.device, script, arguments=theirs)
    job = jobs.Job(
        script=script,
        arguments=tuple(theirs),
        nproc=nproc,
        settings=settings,
        environment=dict(environment),
    )
    report = _answer(job, fork, tell, settle)
    if settle and report.summary.leaves_doubt:
        tell(
            f"not every cause is known: checking with modules isolated, in {job.directory}-isolated"
        )
        try:
            alone = dataclasses.replace(_answer(job.isolated(), fork, tell), isolating=())
            report = dataclasses.replace(report, isolated=alone)
        except TTraceError as error:
            tell(f"the check with modules isolated gave no answer: {error}")
    return timed(report, time.monotonic() - began)


def timed(report: Report, seconds: float) -> Report:
    """The report of a check that took so long, from its caller's point of view."""
    timings = {**report.summary.timings, "wall": seconds}
    return dataclasses.replace(report, summary=dataclasses.replace(report.summary, timings=timings))


def _answer(job: jobs.Job, fork: bool, say: Callable[[str], None], settle: bool = False) -> Report:
    from megatron_ttrace.jobs import job as jobs
    from megatron_ttrace.trace import files

    summary = (jobs.settled if settle else jobs.run)(job, fork=fork, say=say)
    written, verdicts = files.load_report(job.directory)
    if written.run != summary.run:
        raise TTraceError(f"{job.directory} was taken by another check: choose another directory")
    return Report(
        summary=summary,
        verdicts=tuple(verdicts),
        directory=job.directory,
        isolating=tuple(job.isolating()),
    )
