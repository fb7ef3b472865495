# SPDX-License-Identifier: Apache-2.0
"""Small jobs that the end-to-end tests run."""

import os
import subprocess
import sys
from pathlib import Path

from tests import warm

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "launch" / "pretrain_gpt.py"

TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 2 --global-batch-size 4 --train-iters 3 "
    "--lr 1e-3 --lr-warmup-iters 0 --mock-data --tokenizer-type NullTokenizer --vocab-size 64 "
    "--eval-iters 0 --attention-dropout 0 --hidden-dropout 0 --transformer-impl local "
    "--log-interval 1"
).split()


def environment(**more: str) -> dict[str, str]:
    """This process' environment, with the checkout first on the path."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def ttrace(
    *words: object, cwd: Path, timeout: float = 280, cold: bool = False, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does; ``cold`` in a fresh interpreter (see tests/warm.py)."""
    return python("-m", "megatron_ttrace", *words, cwd=cwd, timeout=timeout, cold=cold, **more)


def torchrun(
    nproc: int, *words: object, cwd: Path, cold: bool = False, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a training script on ranks; ``cold``: under torchrun itself, in fresh interpreters."""
    launcher: list[object] = ["-m", "tests.ranks", nproc]
    if cold:
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", nproc]
        launcher += ["--master-port", "0", "--rdzv-backend", "c10d"]
        launcher += ["--rdzv-endpoint", "127.0.0.1:0"]
    return python(*launcher, *words, cwd=cwd, timeout=280, cold=cold, **more)


def python(
    *words: object, cwd: Path, timeout: float, cold: bool, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run ``python WORDS``."""
    if not cold:
        return warm.run(words, cwd=cwd, env=environment(**more), timeout=timeout)
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def our_lines(text: str) -> list[str]:
    """What ttrace itself said."""
    return [line for line in text.splitlines() if line.startswith("ttrace")]
