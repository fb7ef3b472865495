# SPDX-License-Identifier: Apache-2.0
"""The jobs of the benchmarks, and how they are run."""

import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.programs import environment

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "tests" / "bench" / "train.py"
SCRIPT = ROOT / "launch" / "pretrain_gpt.py"

_COMMON = (
    "--micro-batch-size 2 --lr 1e-4 --lr-decay-style constant --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 1000 --eval-iters 0 --attention-dropout 0 "
    "--hidden-dropout 0 --transformer-impl local --log-interval 100 --num-attention-heads 8"
).split()


class BenchError(Exception):
    """A benchmark that could not be run; one line."""


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """A training job.

    Attributes:
        name: in tables.
        hidden, layers, sequence, microbatches: its size; two samples a microbatch.
        ranks: that it runs on.
        layout: Megatron's arguments for them, and other ones.
    """

    name: str
    hidden: int = 256
    layers: int = 8
    sequence: int = 256
    microbatches: int = 2
    ranks: int = 1
    layout: tuple[str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        """Megatron's, without the number of iterations."""
        sizes = {
            "--num-layers": self.layers,
            "--hidden-size": self.hidden,
            "--seq-length": self.sequence,
            "--max-position-embeddings": self.sequence,
            "--global-batch-size": 2 * self.microbatches,
        }
        return [*_COMMON, *(str(w) for pair in sizes.items() for w in pair), *self.layout]


BASE = Job("benchmark job")
LARGE = Job("4 times as large", hidden=512, sequence=512)
TP2 = dataclasses.replace(BASE, name="TP 2", ranks=2, layout=("--tensor-model-parallel-size", "2"))
PP2 = dataclasses.replace(
    BASE, name="PP 2", ranks=2, layout=("--pipeline-model-parallel-size", "2")
)
BF16 = dataclasses.replace(BASE, name="bf16", layout=("--bf16",))


@dataclasses.dataclass(frozen=True, slots=True)
class Turns:
    """What a job's turns took (see tests/bench/train.py); of each turn the slowest rank.

    Attributes:
        plain, dear: seconds of each pair's iterations.
        steps: seconds of Megatron's own step in each dear turn, with capture; not a rehearsal's
            preparation.
        peaks: of the ranks, bytes of memory above the peak of the first, plain turn.
        peaks_mapped: the same with mapped files.
        plain_peak: the first turn's bytes.
    """

    plain: tuple[float, ...]
    dear: tuple[float, ...]
    steps: tuple[float, ...]
    peak: int
    peak_mapped: int
    plain_peak: int

    @property
    def ratio(self) -> float:
        """The median of the pairs' ratios."""
        return median_ratio(self.dear, self.plain)


def median_ratio(dear: Sequence[float], plain: Sequence[float]) -> float:
    """The median of the pairs' ratios."""
    return statistics.median(a / b for a, b in zip(dear, plain, strict=True))


@contextmanager
def scratch() -> Iterator[Path]:
    """A directory that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as home:
        yield Path(home)


def in_turns(
    job: Job,
    tool: str,
    pairs: int,
    home: Path,
    *more: str,
    python: Path = Path(sys.executable),
    **variables: str,
) -> Turns:
    """Run a job with every second iteration captured by a tool.

    Raises:
        BenchError: when it failed, or when ttrace did not find the job equivalent.
    """
    words = [*job.arguments, "--train-iters", str(2 * pairs + 10), *more]
    if tool == "ttrace":
        words += ["--ttrace", "--ttrace-no-wandb", "--ttrace-dir", str(home / "run")]
        words += ["--ttrace-seeds", "2"]
    plan = json.dumps({"out": str(home), "pairs": pairs, "tool": tool})
    command = [str(python), "-m", "tests.ranks", str(job.ranks), str(TRAIN), *words]
    run(command, home, BENCH=plan, **variables)
    if tool == "ttrace":
        summary = json.loads((home / "run" / "summary.json").read_text())
        if summary["verdict"] != "equivalent":
            raise BenchError(f"{job.name}: {summary['verdict']}, so its times mean nothing")
    return _read(home, job.ranks)


def run(command: Sequence[str], home: Path, **variables: str) -> None:
    """Run a command to its end. Raises :class:`BenchError` when it failed."""
    env = environment(**variables)
    log = home / "log"
    with log.open("w") as out:
        code = subprocess.run(
            command, cwd=home, env=env, stdout=out, stderr=subprocess.STDOUT, check=False
        ).returncode
    if code:
        last = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
        raise BenchError(f"{' '.join(command)[:200]} ended with exit code {code}:\n{last}")


@contextmanager
def started(command: Sequence[str], home: Path) -> Iterator[subprocess.Popen[str]]:
    """A command that runs, its output in a pipe; it has ended afterwards."""
    with subprocess.Popen(
        command,
        cwd=home,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        yield process


def _read(home: Path, ranks: int) -> Turns:
    """The results of all ranks; the first turn and the last pair are there for their memory."""
    found = [json.loads((home / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    by_turn = list(zip(*found, strict=True))
    counted = [turn for turn in by_turn if turn[0]["number"] >= 0]
    *timed_dear, sampled_dear = [turn for turn in counted if turn[0]["is_dear"]]
    timed_plain = [turn for turn in counted if not turn[0]["is_dear"]][:-1]

    def most(turns: Sequence[Sequence[dict]], name: str) -> tuple[float, ...]:
        return tuple(max(rank[name] for rank in turn) for turn in turns)

    def above(name: str) -> int:
        ranks = zip(sampled_dear, by_turn[0], strict=True)
        return max(dear[name] - plain[name] for dear, plain in ranks)

    return Turns(
        plain=most(timed_plain, "seconds"),
        dear=most(timed_dear, "seconds"),
        steps=tuple(max((rank["steps"] or [0.0])[0] for rank in turn) for turn in timed_dear),
        peak=above("peak"),
        peak_mapped=above("resident"),
        plain_peak=max(rank["peak"] for rank in by_turn[0]),
    )
