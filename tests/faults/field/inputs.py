# SPDX-License-Identifier: Apache-2.0
"""Bad input and foreign files: one line and exit code 2, and nothing of somebody's changes."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import time
from pathlib import Path

from tests.faults.field.rows import Row, said_wrongly
from tests.integration.jobs import SCRIPT, TINY, ttrace

_ALIASES = "a: &a [x, x]\n" + "".join(f"b{n}: &b{n} [*a, *a]\n" for n in range(9)).replace(
    "*a, *a", "*a, *a, *a, *a, *a, *a, *a, *a"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Bad:
    """A command in a home directory. ``HOME`` is that, ``FILE`` a file with ``content``."""

    id: str
    words: str
    content: bytes = b""
    codes: tuple[int, ...] = (2,)
    kind: str = "input"


_JOB = f"-- {SCRIPT} {' '.join(TINY)}"
_CHECK = "check --quiet --ttrace-no-wandb"
_KNOWN = "diff --known FILE HOME/a HOME/b"
_RECIPE = "shrink --recipe FILE x"
BAD = (
    Bad("yaml-merge-bomb", _RECIPE, b"x: &x {a: 1}\n" + b"y: &y {<<: [" + b"*x, " * 9**5 + b"]}\n"),
    Bad("yaml-nested-aliases", _RECIPE, _ALIASES.encode()),
    Bad("yaml-python-tag", _RECIPE, b"x: !!python/object/apply:os.system ['touch HOME/ran']\n"),
    Bad("yaml-deep-flow", _RECIPE, b"{a: " * 20000),
    Bad("yaml-self-alias", _RECIPE, b"&a [*a]\n"),
    Bad("yaml-utf16", _RECIPE, "x: 1\n".encode("utf-16")),
    Bad("yaml-escapes", _RECIPE, b'"\\e[31m\\a": "\\e]0;x\\a"\n'),
    Bad("yaml-large-integer", _RECIPE, b"MODEL_ARGS: {--num-layers: 0x" + b"f" * 99999 + b"}\n"),
    Bad("yaml-documents", _RECIPE, b"---\n" * 99999),
    Bad("yaml-zero-bytes", _RECIPE, bytes(4096)),
    Bad("toml-deep-arrays", _KNOWN, b"a = " + b"[" * 99999),
    Bad("toml-long-key", _KNOWN, b"a." * 9999 + b"b = 1\n"),
    Bad("toml-large-integer", _KNOWN, b"a = " + b"9" * 99999 + b"\n"),
    Bad("toml-binary", _KNOWN, bytes(range(256)) * 16),
    Bad("toml-surrogate", _KNOWN, b'a = "\\ud800"\n'),
    Bad("seeds-huge", f"{_CHECK} --ttrace-seeds 99999999999999999999 {_JOB}"),
    Bad("seeds-unicode-digits", f"{_CHECK} --ttrace-seeds ²³ {_JOB}"),
    Bad("timeout-nan", f"{_CHECK} --timeout nan {_JOB}"),
    Bad("timeout-infinite", f"{_CHECK} --timeout -inf {_JOB}"),
    Bad("ranks-zero", f"{_CHECK} --nproc-per-node 0 {_JOB}"),
    Bad("ranks-huge", f"{_CHECK} --nproc-per-node 999999999 {_JOB}"),
    Bad("iterations-huge", f"{_CHECK} --ttrace-iterations 1-99999999999999 {_JOB}"),
    Bad("share-above-one", f"{_CHECK} --allow-unchecked 1e999 {_JOB}"),
    Bad("memory-negative", f"{_CHECK} --ttrace-memory-mb -1 {_JOB}"),
    Bad("layout-nonsense", f"{_CHECK} --ttrace-reference-layout tp=99999999999pp=0 {_JOB}"),
    Bad("report-of-a-device", "report /dev/zero"),
    Bad("report-html-into-a-fifo", "report HOME --html HOME/fifo"),
    # Foreign files: HOME is somebody's.
    Bad("dir-is-a-fifo", f"{_CHECK} --ttrace-dir HOME/fifo {_JOB}", kind="foreign"),
    Bad("dir-is-a-file", f"{_CHECK} --ttrace-dir HOME/notes.txt {_JOB}", kind="foreign"),
    Bad("dir-below-a-file", f"{_CHECK} --ttrace-dir HOME/notes.txt/x {_JOB}", kind="foreign"),
    Bad("dir-has-a-summary", f"{_CHECK} --ttrace-dir HOME/has {_JOB}", kind="foreign"),
    Bad("dir-has-linked-logs", f"{_CHECK} --ttrace-dir HOME/linked {_JOB}", kind="foreign"),
    Bad("dir-is-etc", f"{_CHECK} --ttrace-dir /proc/self/fd {_JOB}", kind="foreign"),
    Bad("record-into-home", f"record --quiet --ttrace-dir HOME/has {_JOB}", kind="foreign"),
    Bad("clean-home", "clean HOME --yes --older-than 0", codes=(0, 2), kind="foreign"),
    Bad("ci-into-a-file", "ci --base HEAD --directory HOME/notes.txt HOME", kind="foreign"),
    Bad("ci-into-home", "ci --base HEAD --directory HOME HOME", kind="foreign"),
    Bad("bisect-into-home", f"bisect --directory HOME a b {_JOB}", kind="foreign"),
    Bad("diff-into-home", "diff --directory HOME HOME/a HOME/b", kind="foreign"),
    Bad("compare-into-home", "compare HOME/a HOME/b --output HOME/has", kind="foreign"),
    Bad("recipes-into-home", "recipes HOME --directory HOME/linked --dry-run", kind="foreign"),
    Bad("html-over-a-link", "report HOME/has --html HOME/link", kind="foreign"),
    Bad("junit-over-a-file", "report HOME/has --junit HOME/notes.txt", kind="foreign"),
    Bad(
        "data-over-a-file",
        "shrink --data HOME/notes.txt -- x.py",
        codes=(0, 2),
        kind="foreign",
    ),
    Bad("cache-is-home", f"{_CHECK} --ttrace-dir HOME/new {_JOB} --num-layers 0", kind="foreign"),
)


def _home(folder: Path) -> Path:
    home = folder / "home"
    for name in ("has/logs", "linked", "target", "reference", "trees/x", "checks/.git", "a", "b"):
        (home / name).mkdir(parents=True)
    for name in (
        *("notes.txt", "has/summary.json", "has/verdicts.jsonl", "has/report.html", "has/.lock"),
        *("has/logs/rank-00000.log", "has/junit.xml", "target/precious", "reference/meta.json"),
        *(".ttrace-run", "trees/x/file", "summary.json", "a/meta.json", "overrides.json"),
    ):
        (home / name).write_text(f"somebody's {name}")
    (home / "linked" / "logs").symlink_to(home / "target")
    (home / "linked" / "reference").symlink_to(home / "target")
    (home / "linked" / "trees").symlink_to(home / "target")
    (home / "link").symlink_to(home / "target" / "precious")
    os.link(home / "notes.txt", home / "has" / "reference.log")
    os.mkfifo(home / "fifo")
    return home


def _state(home: Path) -> dict[str, str]:
    found = {}
    for path in sorted(home.rglob("*")):
        if path.is_symlink():
            data = os.fsencode(os.readlink(path))
        else:
            data = path.read_bytes() if path.is_file() else b""
        mode = oct(path.lstat().st_mode)
        found[str(path.relative_to(home))] = f"{hashlib.sha256(data).hexdigest()} {mode}"
    return found


def give(bad: Bad, folder: Path) -> Row:
    """Run the command."""
    shutil.rmtree(folder, ignore_errors=True)
    home = _home(folder)
    file = folder / "input.yaml"
    file.write_bytes(bad.content.replace(b"HOME", os.fsencode(home)))
    words = [w.replace("HOME", str(home)).replace("FILE", str(file)) for w in bad.words.split()]
    before, began = _state(home), time.monotonic()
    done = ttrace(
        *words, cwd=folder, timeout=200, HOME=str(home), TTRACE_CACHE=str(folder / "cache")
    )
    after = _state(home)
    problems = [] if done.returncode in bad.codes else [f"exit code {done.returncode}"]
    problems += said_wrongly(done.stdout + done.stderr)
    if time.monotonic() - began > 90:
        problems.append(f"{time.monotonic() - began:.0f} s")
    if changed := [name for name in before if before[name] != after.get(name)]:
        problems.append(f"changed {changed[:5]}")
    if done.returncode == 2 and not any(
        line.startswith(("ttrace", "usage")) for line in done.stderr.splitlines()
    ):
        problems.append("no line that says why")
    return Row(f"{bad.kind}-{bad.id}", bad.kind, True, tuple(problems), done.stderr[-300:])
