# SPDX-License-Identifier: Apache-2.0
"""Jobs that save and go on, without the checker: what is healthy, and which faults are real."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from megatron_ttrace.trace.errors import TTraceError
from tests.assay.checkpoints.jobs import LAST, SAVED, Job, Layout, Planted
from tests.assay.planted.checkpoint_faults import MECHANISMS, Side
from tests.assay.planted.checkpoints import TRUTH
from tests.assay.planted.mistakes import PLANTED
from tests.assay.planted.train import ORDER
from tests.integration.jobs import TRAIN, bits_of, torchrun


@dataclasses.dataclass(frozen=True)
class Run:
    """A training that ended.

    Attributes:
        code: its exit code.
        states: checksums of what each rank began with, by rank and name.
        bits: what each step logged and the weights it left.
        truth: what a fault changed: states and names.
        error: the end of its output, if it failed.
    """

    code: int
    states: dict[str, str]
    bits: tuple[str, ...]
    truth: tuple[tuple[str, str], ...]
    error: str


def run(directory: Path, nproc: int, job: Job, words: Sequence[object], fault: str = "") -> Run:
    """Train in ``directory``, which is the working directory."""
    scratch = directory / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    more = {ORDER: json.dumps({"bits": True, "mode": "bare", "states": str(scratch)})}
    if fault:
        more |= {PLANTED: fault, TRUTH: str(scratch)}
    arguments = (*job.base, *job.layout.flags, *words)
    done = torchrun(nproc, TRAIN, *arguments, cwd=directory, **more)
    states = {
        f"{file.stem} {name}": digest
        for file in scratch.glob("[0-9]*.json")
        for name, digest in json.loads(file.read_text()).items()
    }
    truth = {
        (state, name)
        for file in scratch.glob("truth-*.json")
        for state, name in json.loads(file.read_text())
    }
    shutil.rmtree(scratch)
    error = "" if done.returncode == 0 else _reason(done.stderr)
    return Run(done.returncode, states, tuple(bits_of(done.stdout)), tuple(sorted(truth)), error)


def _reason(text: str) -> str:
    """The last lines of the tracebacks, without those of ranks that lost a peer."""
    ends = (line for line in text.splitlines() if re.match(r"[\w.]+(Error|Exception)\b", line))
    return "\n".join(line for line in ends if "gloo" not in line) or text[-2000:]


def save(directory: Path, job: Job, fault: str = "", last: int = LAST) -> Run:
    """Train to the end; the checkpoint of the middle is the one that ``directory/ck`` offers."""
    shutil.rmtree(directory / "ck", ignore_errors=True)
    words = ("--save", "ck", "--save-interval", SAVED)
    if last != LAST:
        words = (*words, "--exit-interval", last)
    done = run(directory, job.layout.nproc, job, words, fault)
    tracker = directory / "ck" / "latest_checkpointed_iteration.txt"
    if tracker.is_file():
        # Not --ckpt-step: with the torch format Megatron reads optimizer state of the newest.
        tracker.write_text(str(SAVED), encoding="utf-8")
    return done


def resume(directory: Path, job: Job, layout: Layout, fault: str = "") -> Run:
    """Go on from ``directory/ck``."""
    words = (*layout.changed(job.layout), "--load", "ck")
    return run(directory, layout.nproc, job, words, fault)


@dataclasses.dataclass(frozen=True)
class Proof:
    """What a fault does without the checker.

    Attributes:
        loud: how Megatron itself fails; empty if it does not.
        truth: states and names that were changed.
        differs: the state that differs when training begins, by rank.
        trains: whether any number or weight of the following steps differs.
    """

    loud: str
    truth: tuple[tuple[str, str], ...]
    differs: tuple[str, ...] = ()
    trains: bool = False

    @property
    def is_real(self) -> bool:
        """Whether Megatron says nothing, and training begins with, or goes on to, other values."""
        return not self.loud and (bool(self.differs) or self.trains)


class Workshop:
    """Runs without the checker, in a directory; healthy ones are made once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._saved: dict[str, Run] = {}
        self._resumed: dict[tuple[str, str], Run] = {}

    def folder(self, job: Job) -> Path:
        """Where a job's healthy checkpoint ``ck`` is."""
        return self._directory / job.id

    def saved_in(self, job: Job) -> Path:
        """The healthy checkpoint, which is made if it is not there."""
        self.saved(job)
        return (self.folder(job) / "ck").resolve()

    def saved(self, job: Job) -> Run:
        """The uninterrupted run."""
        if job.id not in self._saved or self._saved[job.id].code:
            self._saved[job.id] = save(self.folder(job), job)
        return self._saved[job.id]

    def resumed(self, job: Job, layout: Layout) -> Run:
        """The healthy run that goes on from the checkpoint."""
        key = (job.id, str(layout))
        if key not in self._resumed or self._resumed[key].code:
            healthy = self.saved(job)
            again = healthy if healthy.code else resume(self.folder(job), job, layout)
            self._resumed[key] = again
        return self._resumed[key]

    def prove(self, planted: Planted) -> Proof:
        """Plant a fault and compare with the healthy run of the same job and layout.

        Raises:
            TTraceError: when a healthy run fails.
        """
        fault, job = planted.fault, planted.job
        healthy = self.resumed(job, planted.into)
        if healthy.code:
            raise TTraceError(f"{job.id} into {planted.into}: {healthy.error}")
        folder, truth = self.folder(job), None
        if fault.side is Side.SAVE:
            folder = folder / "fault"
            saved = save(folder, job, fault.order, SAVED)
            truth = saved.truth
            if saved.code:
                return Proof(saved.error, saved.truth)
        is_wrong_again = fault.side is Side.LOAD or MECHANISMS[fault.mechanism].describes
        again = resume(folder, job, planted.into, fault.order if is_wrong_again else "")
        truth = again.truth if truth is None else truth
        if fault.side is Side.SAVE:
            shutil.rmtree(folder)
        if again.code:
            return Proof(again.error, truth)
        names = sorted(healthy.states.keys() | again.states.keys())
        differs = [name for name in names if healthy.states.get(name) != again.states.get(name)]
        return Proof("", truth, tuple(differs), again.bits != healthy.bits)
