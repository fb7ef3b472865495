# SPDX-License-Identifier: Apache-2.0
"""Bad input and foreign files: one line and exit code 2, and nothing of somebody's changes."""

import functools
import os
from pathlib import Path

from tests.assay.faults.experiment import Experiment
from tests.assay.faults.fault import Family, Fault, Promise, action, changed
from tests.assay.faults.processes import Command, Started
from tests.integration.jobs import SCRIPT, TINY
from tests.trace.test_owned import state_of

_ALIASES = "a: &a [x, x]\n" + "".join(f"b{n}: &b{n} [*a, *a]\n" for n in range(9)).replace(
    "*a, *a", "*a, *a, *a, *a, *a, *a, *a, *a"
)


@action
def run(x: Experiment, words: str, content: bytes = b"") -> None:
    """A command in a home directory, of which nothing changes.

    ``HOME`` is that directory, ``FILE`` a file with ``content``.
    """
    x.injected, home, file = True, _home(x.home), x.home / "input.yaml"
    file.write_bytes(content.replace(b"HOME", os.fsencode(home)))
    before = state_of(home)
    command = Command(
        words=tuple(words.replace("HOME", str(home)).replace("FILE", str(file)).split()),
        home=x.home,
        variables={"HOME": str(home), "TTRACE_CACHE": str(x.home / "cache")},
    )
    x.watch(Started(command), limit=1.5 * x.limit, report=False, is_check=False)
    x.problems += changed(before, home)


def _bad(
    name: str, words: str, content: bytes = b"", codes=(2,), family: Family = Family.INPUTS
) -> Fault:
    prefix = "input" if family is Family.INPUTS else "foreign"
    return Fault(f"{prefix}-{name}", family, run(words, content), Promise(codes, verdict=False))


_foreign = functools.partial(_bad, family=Family.FOREIGN)
_JOB = f"-- {SCRIPT} {' '.join(TINY)}"
_CHECK = "check --quiet --ttrace-no-wandb"
_KNOWN = "diff --known FILE HOME/a HOME/b"
_RECIPE = "shrink --recipe FILE x"
FAULTS = (
    _bad(
        "yaml-merge-bomb", _RECIPE, b"x: &x {a: 1}\n" + b"y: &y {<<: [" + b"*x, " * 9**5 + b"]}\n"
    ),
    _bad("yaml-nested-aliases", _RECIPE, _ALIASES.encode()),
    _bad("yaml-python-tag", _RECIPE, b"x: !!python/object/apply:os.system ['touch HOME/ran']\n"),
    _bad("yaml-deep-flow", _RECIPE, b"{a: " * 20000),
    _bad("yaml-self-alias", _RECIPE, b"&a [*a]\n"),
    _bad("yaml-utf16", _RECIPE, "x: 1\n".encode("utf-16")),
    _bad("yaml-escapes", _RECIPE, b'"\\e[31m\\a": "\\e]0;x\\a"\n'),
    _bad("yaml-large-integer", _RECIPE, b"MODEL_ARGS: {--num-layers: 0x" + b"f" * 99999 + b"}\n"),
    _bad("yaml-documents", _RECIPE, b"---\n" * 99999),
    _bad("yaml-zero-bytes", _RECIPE, bytes(4096)),
    _bad("toml-deep-arrays", _KNOWN, b"a = " + b"[" * 99999),
    _bad("toml-long-key", _KNOWN, b"a." * 9999 + b"b = 1\n"),
    _bad("toml-large-integer", _KNOWN, b"a = " + b"9" * 99999 + b"\n"),
    _bad("toml-binary", _KNOWN, bytes(range(256)) * 16),
    _bad("toml-surrogate", _KNOWN, b'a = "\\ud800"\n'),
    _bad("seeds-huge", f"{_CHECK} --ttrace-seeds 99999999999999999999 {_JOB}"),
    _bad("seeds-unicode-digits", f"{_CHECK} --ttrace-seeds ²³ {_JOB}"),
    _bad("timeout-nan", f"{_CHECK} --timeout nan {_JOB}"),
    _bad("timeout-infinite", f"{_CHECK} --timeout -inf {_JOB}"),
    _bad("ranks-zero", f"{_CHECK} --nproc-per-node 0 {_JOB}"),
    _bad("ranks-huge", f"{_CHECK} --nproc-per-node 999999999 {_JOB}"),
    _bad("iterations-huge", f"{_CHECK} --ttrace-iterations 1-99999999999999 {_JOB}"),
    _bad("share-above-one", f"{_CHECK} --allow-unchecked 1e999 {_JOB}"),
    _bad("memory-negative", f"{_CHECK} --ttrace-memory-mb -1 {_JOB}"),
    _bad("layout-nonsense", f"{_CHECK} --ttrace-reference-layout tp=99999999999pp=0 {_JOB}"),
    _bad("report-of-a-device", "report /dev/zero"),
    _bad("report-html-into-a-fifo", "report HOME --html HOME/fifo"),
    # Foreign files: HOME is somebody's.
    _foreign("dir-is-a-fifo", f"{_CHECK} --ttrace-dir HOME/fifo {_JOB}"),
    _foreign("dir-is-a-file", f"{_CHECK} --ttrace-dir HOME/notes.txt {_JOB}"),
    _foreign("dir-below-a-file", f"{_CHECK} --ttrace-dir HOME/notes.txt/x {_JOB}"),
    _foreign("dir-has-a-summary", f"{_CHECK} --ttrace-dir HOME/has {_JOB}"),
    _foreign("dir-has-linked-logs", f"{_CHECK} --ttrace-dir HOME/linked {_JOB}"),
    _foreign("dir-is-etc", f"{_CHECK} --ttrace-dir /proc/self/fd {_JOB}"),
    _foreign("record-into-home", f"record --quiet --ttrace-dir HOME/has {_JOB}"),
    _foreign("clean-home", "clean HOME --yes --older-than 0", codes=(0, 2)),
    _foreign("ci-into-a-file", "ci --base HEAD --directory HOME/notes.txt HOME"),
    _foreign("ci-into-home", "ci --base HEAD --directory HOME HOME"),
    _foreign("bisect-into-home", f"bisect --directory HOME a b {_JOB}"),
    _foreign("diff-into-home", "diff --directory HOME HOME/a HOME/b"),
    _foreign("compare-into-home", "compare HOME/a HOME/b --output HOME/has"),
    _foreign("recipes-into-home", "recipes HOME --directory HOME/linked --dry-run"),
    _foreign("html-over-a-link", "report HOME/has --html HOME/link"),
    _foreign("junit-over-a-file", "report HOME/has --junit HOME/notes.txt"),
    _foreign(
        "data-over-a-file",
        "shrink --data HOME/notes.txt -- x.py",
        codes=(0, 2),
    ),
    _foreign("cache-is-home", f"{_CHECK} --ttrace-dir HOME/new {_JOB} --num-layers 0"),
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
