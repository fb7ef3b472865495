# SPDX-License-Identifier: Apache-2.0
"""Ranks of several nodes must see the same --ttrace-dir."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ttrace.jobs.processes.child import free_port
from megatron_ttrace.trace import manifests, owned, shared
from megatron_ttrace.trace.errors import TTraceError
from tests.integration.jobs import SCRIPT, TINY
from tests.programs import environment


def test_one_directory(tmp_path: Path) -> None:
    """What one rank marks another one finds."""
    shared.require(tmp_path / "out", shared.prepare(tmp_path / "out"))


@pytest.mark.parametrize("there", [None, "another run"])
def test_another_nodes_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str | None
) -> None:
    """No mark, or one of another run: one line that says what to choose."""
    monkeypatch.setattr(shared, "_PAUSE", 0.0)
    mark = shared.prepare(tmp_path)
    (tmp_path / shared.MARK).unlink()
    if there is not None:
        (tmp_path / shared.MARK).write_text(there)
    with pytest.raises(TTraceError, match="that all nodes share") as caught:
        shared.require(tmp_path, mark)
    assert "\n" not in str(caught.value)


def test_a_late_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that shows up after a moment is enough."""
    mark = shared.prepare(tmp_path)
    (tmp_path / shared.MARK).unlink()
    monkeypatch.setattr(shared.time, "sleep", lambda _: (tmp_path / shared.MARK).write_text(mark))
    shared.require(tmp_path, mark)


def test_not_writable(tmp_path: Path) -> None:
    """A file stands where the directory should be."""
    (tmp_path / "out").write_text("")
    with pytest.raises(TTraceError, match="not writable"):
        shared.prepare(tmp_path / "out")


def left_by_a_run(directory: Path) -> list[Path]:
    """What a run leaves, and files of somebody else in the same places."""
    files = [
        *("summary.json", "verdicts.jsonl", "report.html", "junit.xml", "reference.log"),
        *("logs/rank-00000.log", ".shares-7/overrides.json", ".shares-7/rank-00000.index.jsonl"),
        *("candidate/meta.json", "candidate/rank-00000.index.jsonl", "replay.log"),
        *("candidate/rank-00000.0000.safetensors", "start/meta.json", "reference/meta.json"),
        f".summary.json.{'7' * 16}",
    ]
    theirs = ["logs/train.log", "candidate/rank-0.foo", "logs/x.tmp", ".old-x/a", "notes.txt"]
    for name in files:
        owned.make((directory / name).parent)
        os.close(owned.create(directory / name))
    for name in theirs:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text("")
    return [directory / name for name in [*theirs, "reference/meta.json"]]


def files_of(directory: Path) -> set[Path]:
    """All files, without our manifests."""
    found = (path for path in directory.rglob("*") if path.is_file())
    return {path for path in found if not owned.MANIFEST.match(path.name)}


def test_a_claimed_directory(tmp_path: Path) -> None:
    """What an earlier run left is gone, other files stay; nobody else can claim it meanwhile."""
    kept = left_by_a_run(tmp_path)
    with shared.claim(tmp_path) as held:
        ours = {tmp_path / name for name in (".lock", ".ranks", shared.MARK)}
        assert files_of(tmp_path) == {*kept, *ours}
        assert not (tmp_path / "start").exists()
        assert len(held.run) == 16
        left_by_a_run(tmp_path)
        says = rf"is in use by another check \(process {os.getpid()} on "
        for take in (
            shared.claim,
            shared.require_free,
            lambda directory: shared.claim_report(directory, "a"),
        ):
            with pytest.raises(TTraceError, match=says) as caught:
                take(tmp_path)
            assert "\n" not in str(caught.value)
        assert (tmp_path / "summary.json").exists()
        assert (tmp_path / shared.MARK).read_text() == held.run
    with shared.claim_report(tmp_path, held.run):
        assert not (tmp_path / "summary.json").exists()
        assert (tmp_path / "candidate" / "meta.json").exists()
    shared.require_free(tmp_path)


def test_manifests_do_not_pile_up(tmp_path: Path) -> None:
    """However often a directory is used, few of them are in it."""
    for _ in range(3):
        with shared.claim(tmp_path / "out"):
            manifests.tokens.clear()  # as another process
            owned.write(tmp_path / "out" / "summary.json", ["{}"])
    found = [path for path in (tmp_path / "out").iterdir() if owned.MANIFEST.match(path.name)]
    assert len(found) <= 3


def test_nothing_is_removed_through_a_link(tmp_path: Path) -> None:
    """A link of ours to another directory goes, what it points to stays; another's is refused."""
    left_by_a_run(tmp_path / "other")
    (tmp_path / "out").mkdir()
    owned.link(tmp_path / "out" / "candidate", tmp_path / "other" / "candidate")
    shared.claim(tmp_path / "out").release()
    assert not (tmp_path / "out" / "candidate").is_symlink()
    assert (tmp_path / "other" / "candidate" / "meta.json").exists()
    (tmp_path / "out" / "candidate").symlink_to(tmp_path / "other" / "candidate")
    with pytest.raises(TTraceError, match="candidate exists and was not written by ttrace"):
        shared.claim(tmp_path / "out")


def in_a_process(directory: Path, code: str, **more: str) -> subprocess.Popen[str]:
    """Python that has ``directory`` and ``shared``; returned when it has printed a line."""
    return subprocess.Popen(
        [
            *(sys.executable, "-c"),
            "import os, signal, sys, time\nfrom pathlib import Path\n"
            "from megatron_ttrace.trace import shared\n"
            f"directory = Path({str(directory)!r})\n{code}",
        ],
        env=environment(**more),
        stdout=subprocess.PIPE,
        text=True,
    )


def line_of(process: subprocess.Popen[str]) -> str:
    """The next line it prints."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_ranks_of_a_launcher(tmp_path: Path) -> None:
    """They believe the id in their environment if the directory does, and clean nothing."""
    with shared.claim(tmp_path) as held:
        owned.write(tmp_path / "summary.json", [""])
        code = "print(shared.prepare(directory), shared.run_id())"
        rank = in_a_process(tmp_path, code, TTRACE_RUN_ID=held.run)
        assert line_of(rank) == f"{held.run} {held.run}"
        rank.wait()
        assert (tmp_path / "summary.json").exists()


@pytest.mark.parametrize(
    ("folder", "says"),
    [("used", "is in use by another check"), ("gone", "was removed or replaced")],
)
def test_ranks_of_another_launcher(tmp_path: Path, folder: str, says: str) -> None:
    """They do not begin another run in the place of the one that their launcher began."""
    code = "try:\n    shared.prepare(directory)\nexcept shared.TTraceError as e:\n    print(e)"
    with shared.claim(tmp_path / "used"):
        rank = in_a_process(tmp_path / folder, code, TTRACE_RUN_ID="0" * 16)
        assert says in line_of(rank)
        rank.wait()


def test_ranks_without_a_launcher(tmp_path: Path) -> None:
    """Rank 0 claims the directory for as long as it lives; the others join."""
    other = "; other = os.fork() or shared.require(directory, run) or print('joined', flush=True)"
    code = f"run = shared.prepare(directory){other}; other and time.sleep(3600)"
    rank = in_a_process(tmp_path, code)
    try:
        assert line_of(rank) == "joined"
        with pytest.raises(TTraceError, match="in use by another check"):
            shared.claim(tmp_path)
    finally:
        rank.kill()
        rank.wait()


def test_ranks_that_outlive_their_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as one still writes, the directory is not given to another run."""
    monkeypatch.setattr(shared, "_LEFTOVER", 0.2)
    code = (
        "held = shared.claim(directory)\nchild = os.fork()\nif not child:\n"
        "    os.environ['TTRACE_RUN_ID'] = held.run\n"
        "    shared.prepare(directory)\n    print(os.getpid(), flush=True)\n"
        "    if not os.fork():\n        time.sleep(5)\n        os._exit(0)\n"
        "time.sleep(3600)"
    )
    launcher = in_a_process(tmp_path, code)
    rank = int(line_of(launcher))
    launcher.kill()
    launcher.wait()
    try:
        with pytest.raises(TTraceError, match="in use by ranks of an earlier run"):
            shared.claim(tmp_path)
    finally:
        os.kill(rank, signal.SIGKILL)
    # What the rank forked keeps nothing.
    monkeypatch.setattr(shared, "_LEFTOVER", 3.0)
    shared.claim(tmp_path).release()


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, and the directory is free again."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(TTraceError, match=r"is not writable \(No space left on device\)"):
            shared.claim(tmp_path)
    shared.claim(tmp_path).release()


def agents(folder: Path, directory: str) -> list[tuple[int, str]]:
    """Exit codes and output of two torchrun agents, each with a rank and a folder of its own."""
    port = free_port()
    started = []
    for node in range(2):
        home = folder / f"node{node}"
        home.mkdir()
        started.append(
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"),
                    *("--node-rank", str(node), "--nproc-per-node", "1", "--rdzv-backend", "c10d"),
                    *("--rdzv-endpoint", f"127.0.0.1:{port}", SCRIPT, *TINY),
                    *("--tensor-model-parallel-size", "2", "--ttrace", "--ttrace-exit"),
                    *("--ttrace-no-wandb", "--ttrace-dir", directory),
                ],
                cwd=home,
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    said = [process.communicate(timeout=840)[0] for process in started]
    return [(process.returncode, text) for process, text in zip(started, said, strict=True)]


@pytest.mark.nightly
def test_two_nodes(tmp_path: Path) -> None:
    """Two agents, as on two nodes: one shared directory is all they need in common."""
    for code, text in agents(tmp_path, str(tmp_path / "out")):
        assert code == 0, text[-3000:]
    assert '"verdict": "equivalent"' in (tmp_path / "out" / "summary.json").read_text()


@pytest.mark.nightly
def test_two_nodes_with_disks_of_their_own(tmp_path: Path) -> None:
    """A directory of each node's own is told in one line."""
    found = agents(tmp_path, "out")
    assert all(code != 0 for code, _ in found)
    assert any("choose a directory that all nodes share" in text for _, text in found)
