# SPDX-License-Identifier: Apache-2.0
"""Commits of a checkout, in worktrees of their own."""

import os
import subprocess

import pytest

from megatron_ttrace.jobs.processes import worktrees
from megatron_ttrace.jobs.processes.worktrees import Checkout
from megatron_ttrace.trace import owned
from megatron_ttrace.trace.errors import TTraceError
from tests import programs


def git(folder, *words):
    """Git, as somebody."""
    author = ("-c", "user.name=Somebody", "-c", "user.email=some@body")
    done = subprocess.run(
        ["git", "-C", folder, *author, *words], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def commit(folder, message, tag=""):
    """All files; in a new repository where there is none."""
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "--allow-empty", "-m", message)
    if tag:
        git(folder, "tag", tag)


@pytest.fixture
def home(tmp_path):
    """Three commits, and a file that was changed since."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    lines = [f"line {number}\n" for number in range(20)]
    for number in range(3):
        lines[number * 8] = f"changed {number}\n"
        (folder / "a.py").write_text("".join(lines))
        commit(folder, f"change {number}")
    (folder / "a.py").write_text("being edited\n")
    return folder


def test_a_worktree(home, tmp_path):
    """It holds the commit's files and is gone afterwards; the checkout is as it was."""
    before = git(home, "status", "--porcelain", "--branch")
    checkout = Checkout(home)
    with checkout.at(checkout.commit("HEAD~1"), tmp_path / "trees" / "tree") as root:
        assert (root / "a.py").read_text().splitlines()[16] == "line 16"
        assert (root / "a.py").read_text().splitlines()[8] == "changed 1"
    assert not (tmp_path / "trees" / "tree").exists()
    assert git(home, "worktree", "list").count("\n") == 0
    assert git(home, "status", "--porcelain", "--branch") == before
    assert (home / "a.py").read_text() == "being edited\n"


def test_one_that_was_left_behind(home, tmp_path):
    """A killed search is no obstacle."""
    checkout = Checkout(home)
    for _ in range(2):
        owned.make(tmp_path / "trees", whole=True)
        git(home, "worktree", "add", "--detach", "--force", tmp_path / "trees" / "tree", "HEAD")
        with checkout.at(checkout.commit("HEAD"), tmp_path / "trees" / "tree"):
            pass


def test_between(home):
    """From the oldest to the last, without the good one."""
    checkout = Checkout(home)
    first, second, third = (checkout.commit(name) for name in ("HEAD~2", "HEAD~1", "main"))
    assert checkout.between(first, third) == (second, third)
    assert checkout.described(second).endswith(": change 1")
    with pytest.raises(TTraceError, match="does not descend"):
        checkout.between(third, first)
    with pytest.raises(TTraceError, match="GOOD and BAD are the same commit"):
        checkout.between(third, third)


def test_hunks(home):
    """Where a commit changed what."""
    checkout = Checkout(home)
    (hunk,) = checkout.hunks(checkout.commit("HEAD~1"))
    assert (hunk.file, hunk.line, hunk.count) == ("a.py", 7, 5)
    assert "-line 8\n+changed 1\n" in hunk.text
    assert [hunk.distance(line) for line in (1, 7, 11, 15)] == [6, 0, 0, 4]


def test_a_branch(home):
    """Where it began, and what it changed since, without the lines around."""
    git(home, "stash", "-q")
    git(home, "checkout", "-q", "-b", "branch", "HEAD~1")
    (home / "a.py").write_text("".join(f"line {number}\n" for number in range(1, 20)))
    git(home, "commit", "-q", "-a", "-m", "on a branch")
    checkout = Checkout(home)
    head = checkout.commit("branch")
    base = checkout.fork_point(checkout.commit("main"), head)
    assert base == checkout.commit("main~1")
    hunks = checkout.hunks(head, base, context=0)
    assert [(hunk.line, hunk.count) for hunk in hunks] == [(0, 0), (8, 1)]
    assert not checkout.is_edited()
    (home / "a.py").write_text("being edited\n")
    assert checkout.is_edited()
    git(home, "checkout", "-q", "-f", "--orphan", "other")
    git(home, "commit", "-q", "-m", "unrelated")
    with pytest.raises(TTraceError, match="fetch-depth: 0"):
        checkout.fork_point(checkout.commit("other"), head)


def test_lines_that_look_like_headers(home):
    """Deleted dashes and added pluses are content."""
    (home / "b.py").write_text("a\n-- b\n")
    git(home, "add", "b.py")
    git(home, "commit", "-q", "-m", "one")
    (home / "b.py").write_text("a\n++ c\n")
    git(home, "commit", "-q", "-m", "two", "b.py")
    checkout = Checkout(home)
    (hunk,) = checkout.hunks(checkout.commit("HEAD"))
    assert hunk.file == "b.py"
    assert hunk.text.splitlines()[1:] == [" a", "--- b", "+++ c"]


def test_names_of_files(home):
    """With spaces and accents, as they are; a deleted file's is the one that it had."""
    for name in ("with space.py", "naïve.py", "gone.py"):
        (home / name).write_text("1\n")
    git(home, "add", ".")
    git(home, "commit", "-q", "-m", "one")
    (home / "gone.py").unlink()
    for name in ("with space.py", "naïve.py"):
        (home / name).write_text("2\n")
    git(home, "commit", "-q", "-a", "-m", "two")
    checkout = Checkout(home)
    hunks = checkout.hunks(checkout.commit("HEAD"))
    assert {hunk.file for hunk in hunks} == {"with space.py", "naïve.py", "gone.py"}


def test_no_checkout(tmp_path, home):
    """One line that says what to give."""
    with pytest.raises(TTraceError, match="give Megatron's with --checkout DIR"):
        Checkout(tmp_path, " with --checkout DIR")
    # Its name is in the message: a command takes more than one.
    with pytest.raises(TTraceError, match="'absent' is not a commit of"):
        Checkout(home).commit("absent")


def test_no_configured_program_runs(home, tmp_path):
    """Neither hooks nor monitors, filters and what shows differences: files are only read."""
    ran = tmp_path / "ran"
    program = programs.executable(tmp_path / "program", f"#!/bin/sh\necho $0 $* >> {ran}\ncat\n")
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "post-checkout").symlink_to(program)
    (home / ".gitattributes").write_text("*.py filter=own diff=own\n")
    for key in ("filter.own.clean", "filter.own.smudge", "diff.own.textconv", "diff.own.command"):
        git(home, "config", key, program)
    for key in ("core.fsmonitor", "diff.external", "gpg.program"):
        git(home, "config", key, program)
    git(home, "config", "filter.own.required", "true")
    git(home, "config", "core.hooksPath", hooks)
    os.utime(home / "a.py", (1, 1))
    checkout = Checkout(home)
    head = checkout.commit("HEAD")
    assert checkout.is_edited()
    assert checkout.hunks(head)
    assert checkout.described(head)
    assert worktrees.git(home, "diff", "--name-only", head) == "a.py\n"
    assert worktrees.git(home, "show", f"{head}:a.py")
    with checkout.at(head, tmp_path / "trees" / "tree") as root:
        assert (root / "a.py").read_text().startswith("changed 0")
    assert not ran.exists(), ran.read_text()
    git(home, "status")
    assert ran.exists()
