# SPDX-License-Identifier: Apache-2.0
"""The checker's answers: ``ttrace resume``, ``ttrace check --load``, and what is true of them."""

import dataclasses
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ttrace.evaluation.matrix import configurations as matrix
from megatron_ttrace.jobs.resources import launch_dir
from megatron_ttrace.trace.files import load_report
from megatron_ttrace.trace.records import Kind, LoadedIndex
from tests.assay.checkpoints.jobs import Job, Layout
from tests.assay.planted.mistakes import PLANTED
from tests.integration import jobs
from tests.integration.jobs import TRAIN

_STATES = {
    "momentum_buffer": "exp_avg",
    "main weight": "main",
    "param": "main",
    "fp32_param": "main",
    "master_param": "main",
}
_SIDES = {"saving": "save", "loading": "load"}
_STORED = re.compile(r"optimizer\.state\.(\w+?)\.(?=decoder|embedding|output|mtp)")
_SYNONYMS = {
    "max_lr": ("lr", "hyperparameters"),
    "betas": ("beta", "hyperparameters"),
    "eps": ("hyperparameters",),
    "consumed_train_samples": ("samples", "consumed"),
    "num_steps": ("lr", "opt_param_scheduler"),
    "loss_scale": ("scale", "scaler"),
    "rng": ("random", "rng", "generator"),
}
"""A number by the words of names that stand for it, too."""


@dataclasses.dataclass(frozen=True)
class Named:
    """A difference that is reported: what it is of, and who is to blame (empty if not said)."""

    state: str
    name: str
    side: str = ""


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a command answered.

    Attributes:
        verdict: ``diverged``, ``equivalent``, or why there is none.
        named: what differs, the first first.
        text: the end of what it printed, for those who read the report.
    """

    verdict: str
    named: tuple[Named, ...]
    text: str

    def __str__(self) -> str:
        first = self.named[0] if self.named else None
        side = first and (first.side or "side unknown")
        return f"{self.verdict} {first.state} {first.name} ({side})" if first else self.verdict

    @property
    def is_found(self) -> bool:
        """Whether it diverged."""
        return self.verdict == "diverged"


def resume(directory: Path, job: Job, into: Sequence[Layout], fault: str = "") -> Answer:
    """``ttrace resume`` in ``directory``, into other layouts than the job's own."""
    words: list[object] = ["resume", "--json", "--directory", "out"]
    words += ["--nproc-per-node", job.layout.nproc]
    for layout in into:
        if layout != job.layout:
            flags = [f"--nproc-per-node {layout.nproc}", *layout.changed(job.layout)]
            words += ["--into", " ".join(flags)]
    script = TRAIN if fault else launch_dir() / matrix.SCRIPTS.get(job.model, "pretrain_gpt.py")
    words += ["--", script, *job.base, *job.layout.flags]
    document, answer = _run(directory, words, "out/resume.json", fault)
    if document is None:
        return answer
    named = [
        Named(_state(difference["what"]), difference["name"], _SIDES.get(difference["blame"], ""))
        for restart in document["restarts"]
        for difference in restart["differences"]
    ]
    reasons = [restart.get("reason", "") for restart in document["restarts"]]
    verdict = document["verdict"]
    if verdict != "diverged" and any(reasons):
        verdict = next(filter(None, reasons))
    return dataclasses.replace(answer, verdict=verdict, named=tuple(named))


def check(directory: Path, job: Job, layout: Layout, checkpoint: Path, fault: str = "") -> Answer:
    """``ttrace check`` of the job that goes on from a healthy checkpoint."""
    words: list[object] = ["check", "--quiet", "--ttrace-no-wandb", "--ttrace-dir", "out"]
    words += ["--nproc-per-node", layout.nproc, "--", TRAIN, *job.base, *job.layout.flags]
    words += [*layout.changed(job.layout), "--load", checkpoint]
    document, answer = _run(directory, words, "out/summary.json", fault)
    if document is None:
        return answer
    _, verdicts = load_report(directory / "out")
    loaded = [verdict for verdict in verdicts if verdict.kind is Kind.LOADED]
    failed = [verdict for verdict in loaded if verdict.verdict.is_failure]
    named: list[Named] = []
    for culprit in document["culprits"]:
        if culprit["kind"] != Kind.LOADED:
            named.append(Named(culprit["kind"], culprit["name"]))
            continue
        # Of a module the tensors that failed.
        below = f"{culprit['name']}."
        named += [
            Named(_loaded(verdict.index), verdict.name)
            for verdict in failed
            if f"{verdict.name}.".startswith(below)
        ]
    return dataclasses.replace(answer, verdict=document["verdict"], named=tuple(named))


def _run(
    directory: Path, words: Sequence[object], file: str, fault: str
) -> tuple[dict[str, Any] | None, Answer]:
    """The document that a command wrote, and the answer if it did not."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    more = {PLANTED: fault} if fault else {}
    done = jobs.ttrace(*words, cwd=directory, **more)
    path = directory / file
    document = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    reason = f"exit code {done.returncode}: {done.stderr.strip()[-200:]}"
    return document, Answer(reason, (), done.stdout[-1500:] + done.stderr[-3000:])


def _state(what: str) -> str:
    return _STATES.get(what, what)


def _loaded(index: int) -> str:
    """The state that a verdict about what was loaded is of."""
    name = LoadedIndex(index).name.lower()
    return {"one_device": "weight", "rounded": "agreed"}.get(name, name)


def is_right(named: Named, truth: Sequence[tuple[str, str]]) -> bool:
    """Whether a difference is of something that was changed."""
    return any(_is_same(named, state, name) for state, name in truth)


def _is_same(named: Named, state: str, name: str) -> bool:
    if state == "number":
        words = (name, *_SYNONYMS.get(name, ()))
        return any(word in f"{named.state} {named.name}" for word in words)
    theirs = named.name.partition("/")[0]
    if state == "described":
        stored = _STORED.match(name)
        state, name = (stored[1], name[stored.end() :]) if stored else ("weight", name)
        name, theirs = _stacked(name), _stacked(theirs)
    # A culprit of a check may be the module of a parameter.
    same = name == theirs or name.startswith(f"{theirs}.")
    # Weights that are not the main weights: either may be wrong.
    states = ("weight", "main") if named.state == "agreed" else (_state(named.state),)
    return same and _state(state) in states


def _stacked(name: str) -> str:
    """As layers and experts are stored: one tensor for all of them."""
    name = re.sub(r"\.layers\.\d+\.", ".layers.", name)
    name = name.replace("experts.experts.", "experts.")
    name = re.sub(r"local_experts\.\d+\.", "", name)
    return re.sub(r"(weight|bias)\d+$", r"\1", name)
