# SPDX-License-Identifier: Apache-2.0
"""Commands in somebody's home directory: nothing foreign changes, and no secret is written."""

import os
import stat
from pathlib import Path

import pytest

from megatron_ttrace.jobs.restarts import CHECKPOINT
from megatron_ttrace.trace import owned
from tests.integration import jobs
from tests.integration.jobs import ROOT, SCRIPT, ttrace
from tests.integration.secretive import FLAGS
from tests.jobs.commands.test_disclosure import CANARY, SECRET_VARIABLES
from tests.trace.test_owned import foreign, state_of

MODEL = """
    --num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 16
    --max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 2 --train-iters 1
    --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 128
    --tensor-model-parallel-size 2
""".split()
FOLDERS = (".vim.old-2023", ".x.building-1", f".y.old-{'0' * 16}", "trees", "references", "checks")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home directory with names that look like ours, but none of those that a run needs."""
    home = tmp_path / "home"
    home.mkdir()
    for name in FOLDERS:
        (home / name / "deep").mkdir(parents=True)
        (home / name / "deep" / "meta.json").write_text("{}")
        (home / name / "overrides.json").write_text("{}")
    for name in ("x.tmp", ".lock", "rank-0.foo", "notes.txt", "overrides.json"):
        (home / name).write_text("mine")
    foreign(home / ".ranks", "hard link")
    os.mkfifo(home / "fifo")
    (home / "job.sh").write_text("true\n")
    return home


@pytest.mark.slow
def test_commands_in_a_home_directory(home: Path) -> None:
    """A check, its report, what follows it, and commands that are refused; twice."""
    before = state_of(home)
    more = {"HOME": str(home), "TTRACE_CACHE": str(home)}
    for _ in range(2):
        checked = jobs.check(home, flags=("--ttrace-dir", home), model=MODEL, **more)
        assert checked.out == home
    assert (home / "reference").is_symlink()
    for words in (
        ("report", home, "--junit", home / "junit.xml"),
        ("record", "--ttrace-dir", home, "--", SCRIPT, "--no-such-flag"),
        ("ci", "--directory", home, "--base", "HEAD", home),
        ("bisect", "--directory", home, "--checkout", home, "a", "b", "--", SCRIPT),
        ("diff", home, home / "absent", "--directory", home),
        ("recipes", home, "--directory", home, "--dry-run"),
        ("clean", home),
        ("clean", home, "--yes"),
    ):
        done = ttrace(*words, cwd=home, HOME=str(home))
        assert "Traceback" not in done.stderr, done.stderr
        after = state_of(home)
        assert {name: after.get(name) for name in before} == before, words
    assert not (home / "summary.json").exists()


@pytest.mark.slow
def test_no_secret_is_written(tmp_path: Path) -> None:
    """Of environment, flags or code, in no file but logs that only their owner reads."""
    keep = "--ttrace-keep", "all"
    written = with_secrets(tmp_path, "check", "--ttrace-dir", "out", *keep, cold=False)
    assert not [path for path in written if path.suffix != ".log"]
    out = tmp_path / "out"
    assert (out / "reference").is_symlink()
    assert (out / ".gitignore").read_text() == "*\n"
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == owned.PRIVATE_FOLDER
    assert stat.S_IMODE((out / "logs").stat().st_mode) == owned.PRIVATE_FOLDER


@pytest.mark.nightly
def test_no_secret_of_a_restarted_job_is_written(tmp_path: Path) -> None:
    """Only in the checkpoint, where Megatron stores its arguments, as in the job's own."""
    written = with_secrets(tmp_path, "resume", "--directory", "out", cold=True)
    checkpoint = tmp_path / "out" / CHECKPOINT
    assert not [
        path for path in written if path.suffix != ".log" and not path.is_relative_to(checkpoint)
    ]
    assert stat.S_IMODE(checkpoint.stat().st_mode) == owned.PRIVATE_FOLDER


def with_secrets(folder: Path, *command: str, cold: bool) -> list[Path]:
    """Run a command of a job that has secrets; the files they are in, all of them private."""
    temporary = folder / "t"  # a short name: Megatron puts sockets there
    temporary.mkdir()
    names = [*SECRET_VARIABLES, "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DATABASE_URL", "X"]
    flags = [word for flag in FLAGS for word in (flag, f"{CANARY}{flag}")]
    done = ttrace(
        *(*command, "--quiet", "--nproc-per-node", 2, "--"),
        *(ROOT / "tests" / "integration" / "secretive.py", *MODEL, *flags),
        *("--vocab-file", f"s3://key:{CANARY}@bucket/a"),
        cwd=folder,
        cold=cold,
        HOME=str(folder),
        TMPDIR=str(temporary),
        TTRACE_CACHE=str(folder / "cache"),
        **dict.fromkeys(names, f"postgres://user:{CANARY}@host"),
        code=0,
    )
    assert CANARY not in done.stdout + done.stderr
    found = [
        path
        for path in folder.rglob("*")
        if path.is_file() and CANARY.encode() in path.read_bytes()
    ]
    for path in found:
        is_private = stat.S_IMODE(path.stat().st_mode) == owned.PRIVATE_FILE
        assert is_private or CHECKPOINT.name in path.parts, path
    return found
