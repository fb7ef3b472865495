# SPDX-License-Identifier: Apache-2.0
"""Small jobs that the end-to-end tests run."""

import dataclasses
import functools
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ttrace.trace.files import load_report
from megatron_ttrace.trace.records import Summary, Verdict
from tests import programs, warm
from tests.assay.planted.mistakes import PLANTED, load
from tests.assay.planted.train import ORDER, SCRIPT

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "tests" / "assay" / "planted" / "train.py"
TP, PP, CP = (
    (f"--{axis}-parallel-size", "2") for axis in ("tensor-model", "pipeline-model", "context")
)
ZERO = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")

TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 2 --global-batch-size 4 --train-iters 3 "
    "--lr 1e-3 --lr-warmup-iters 0 --mock-data --tokenizer-type NullTokenizer --vocab-size 64 "
    "--eval-iters 0 --attention-dropout 0 --hidden-dropout 0 --transformer-impl local "
    "--log-interval 1"
).split()


def ttrace(*words: object, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does; ``cold`` in a fresh interpreter (see tests/warm.py)."""
    return python("-m", "megatron_ttrace", *words, **more)


def torchrun(
    nproc: int, *words: object, cold: bool = False, **more: Any
) -> subprocess.CompletedProcess[str]:
    """Run a training script on ranks; ``cold``: under torchrun itself, in fresh interpreters."""
    launcher: list[object] = ["-m", "tests.ranks", nproc]
    if cold:
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", nproc]
        launcher += ["--master-port", "0", "--rdzv-backend", "c10d"]
        launcher += ["--rdzv-endpoint", "127.0.0.1:0"]
    return python(*launcher, *words, cold=cold, **more)


def python(
    *words: object,
    cwd: Path,
    timeout: float = 840,
    cold: bool = False,
    code: int | None = None,
    **more: str,
) -> subprocess.CompletedProcess[str]:
    """Run ``python WORDS``, which must end with ``code``."""
    if cold:
        return programs.python(*words, cwd=cwd, timeout=timeout, code=code, **more)
    done = warm.run(words, cwd=cwd, env=programs.environment(**more), timeout=timeout)
    programs.ended(done, code)
    return done


@dataclasses.dataclass(frozen=True)
class Checked:
    """A check that ended, and the report it wrote to ``out``."""

    done: subprocess.CompletedProcess[str]
    out: Path

    @property
    def said(self) -> str:
        """All it printed."""
        return self.done.stdout + self.done.stderr

    @functools.cached_property
    def report(self) -> tuple[Summary, list[Verdict]]:
        """Summary and verdicts."""
        return load_report(self.out)

    @property
    def summary(self) -> Summary:
        return self.report[0]

    @property
    def verdicts(self) -> list[Verdict]:
        return self.report[1]

    @property
    def failed(self) -> list[Verdict]:
        """Verdicts that are failures."""
        return [verdict for verdict in self.verdicts if verdict.verdict.is_failure]

    @property
    def document(self) -> dict[str, Any]:
        """``summary.json`` as others read it."""
        document: dict[str, Any] = json.loads((self.out / "summary.json").read_text())
        return document


def check(
    cwd: Path,
    *words: object,
    flags: Sequence[object] = (),
    nproc: int = 2,
    code: int = 0,
    mistake: str = "",
    script: Path | None = None,
    model: Sequence[object] = TINY,
    cold: bool = False,
    once: bool = True,
    **more: str,
) -> Checked:
    """``ttrace check FLAGS -- SCRIPT MODEL WORDS`` in ``cwd``, which must end with ``code``.

    With a ``mistake``, one of ``tests/assay/planted`` by name, its training script makes that.
    Tests share references, but for those that contain the mistake. If not ``once``, a job of
    whose culprits no cause is known is checked again.
    """
    if mistake:
        more[PLANTED] = mistake
    if not (mistake and load()[mistake].everywhere) and "--ttrace-reference-layout" not in flags:
        more.setdefault("TTRACE_CACHE", os.environ["TTRACE_TEST_REFERENCES"])
    ranks = ("--nproc-per-node", nproc) if nproc else ()
    done = ttrace(
        *("check", "--quiet", "--ttrace-no-wandb", *(["--once"] * once), *ranks, *flags, "--"),
        *(script or (TRAIN if mistake else SCRIPT), *model, *words),
        cwd=cwd,
        cold=cold,
        code=code,
        **more,
    )
    named = list(flags)[list(flags).index("--ttrace-dir") + 1] if "--ttrace-dir" in flags else None
    return Checked(done, cwd / (named or "ttrace-out"))


def train(
    cwd: Path, *words: object, nproc: int = 2, mode: str = "", cold: bool = False, **more: str
) -> subprocess.CompletedProcess[str]:
    """Train a tiny job on ranks that prints its bits; see ``tests/assay/planted/train.py``."""
    more[ORDER] = json.dumps({"bits": True, "mode": mode})
    return torchrun(nproc, TRAIN, *TINY, *words, cwd=cwd, cold=cold, code=0, **more)


def bits_of(text: str) -> list[str]:
    """The numbers that a run logged, of all ranks."""
    return sorted({line[line.index("BITS") :] for line in text.splitlines() if "BITS" in line})


def our_lines(text: str) -> list[str]:
    """What ttrace itself said."""
    return [line for line in text.splitlines() if line.startswith("ttrace")]
