# SPDX-License-Identifier: Apache-2.0
"""``ttrace patch`` on stand-ins of each release."""

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ttrace.cli.main import build_parser
from megatron_ttrace.jobs import resources, script_patch
from megatron_ttrace.mcore import versions
from megatron_ttrace.trace.errors import TTraceError

RELEASES = list(versions.KNOWN)

PACKAGE_INFO = 'MAJOR = {0}\nMINOR = {1}\nPATCH = {2}\nPRE_RELEASE = ""\n'

# Ours, not Megatron's: it has only the line that the patches hold on to.
SCRIPT = """\
# a stand-in
import time

_PROGRAM_START_TIME = time.time()

import sys

print(sys.argv)
"""


def run(*argv: object) -> int:
    args = build_parser(["patch"]).parse_args(["patch", *map(str, argv)])
    return args.run(args)


def stand_in(folder: Path, release: str) -> Path:
    """A checkout with just what the patch looks at."""
    info = folder / "megatron" / "core" / "package_info.py"
    info.parent.mkdir(parents=True)
    info.write_text(PACKAGE_INFO.format(*release.split(".")))
    (folder / "pretrain_gpt.py").write_text(SCRIPT)
    return folder


@pytest.fixture(params=RELEASES)
def checkout(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return stand_in(tmp_path / "Megatron-LM", request.param)


def test_apply_and_reverse(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines come, before any other import; every byte is restored. Once more changes nothing."""
    script = checkout / "pretrain_gpt.py"
    original = script.read_bytes()
    assert run(checkout) == 0
    patched = script.read_bytes()
    lines = patched.decode().splitlines()
    enabled = next(i for i, line in enumerate(lines) if line.startswith("megatron_ttrace.enable()"))
    assert enabled < lines.index("import sys")
    compile(patched, str(script), "exec")
    run(checkout)
    assert script.read_bytes() == patched
    assert "was already patched" in capsys.readouterr().out
    for _ in range(2):
        assert run(checkout, "--reverse") == 0
        assert script.read_bytes() == original
    assert "was not patched" in capsys.readouterr().out
    assert sorted(path.name for path in checkout.iterdir()) == ["megatron", "pretrain_gpt.py"]


def test_check_writes_nothing(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--check`` tells patched from unpatched and touches neither."""
    script = checkout / "pretrain_gpt.py"
    for expected in (False, True):
        before = script.read_bytes()
        assert run(checkout, "--check", "--json") == 0
        answer = json.loads(capsys.readouterr().out)
        assert (answer["applied"], answer["changed"]) == (expected, False)
        assert script.read_bytes() == before
        run(checkout)
        capsys.readouterr()


@pytest.mark.parametrize(
    "edit",
    [
        lambda script: b"# mine\n" * 40 + script + b"# no newline at the end",
        lambda script: script.replace(b"\n", b"\r\n"),
    ],
    ids=["own lines", "Windows"],
)
def test_own_edits_survive(checkout: Path, edit: Callable[[bytes], bytes]) -> None:
    """Lines that a user added elsewhere, and the ends of lines, both ways."""
    script = checkout / "pretrain_gpt.py"
    edited = edit(script.read_bytes())
    script.write_bytes(edited)
    run(checkout)
    content = script.read_bytes()
    assert b"megatron_ttrace.enable()" in content
    assert content.count(b"\r\n") == (content.count(b"\n") if b"\r\n" in edited else 0)
    run(checkout, "--reverse")
    assert script.read_bytes() == edited


def refuses(checkout: Path, message: str, *options: str) -> None:
    """The command fails with one line, and the script keeps its bytes."""
    script = checkout / "pretrain_gpt.py"
    before = script.read_bytes() if script.exists() else None
    with pytest.raises(TTraceError, match=message) as caught:
        run(checkout, *options)
    assert "\n" not in str(caught.value)
    assert (script.read_bytes() if script.exists() else None) == before


@pytest.mark.parametrize("option", [(), ("--check",)])
def test_line_in_the_way(checkout: Path, option: tuple[str, ...]) -> None:
    """The line that does not match is quoted with its number."""
    script = checkout / "pretrain_gpt.py"
    lines = script.read_text().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if line.startswith("_PROGRAM"))
    lines.insert(at + 1, "import mine\n")
    script.write_text("".join(lines))
    refuses(checkout, rf"pretrain_gpt.py:{at + 2}: 'import mine' is in the way", *option)


def test_patched_lines_edited(checkout: Path) -> None:
    """Patched lines that were edited are not recognised; the first of them is named."""
    run(checkout)
    script = checkout / "pretrain_gpt.py"
    script.write_text(script.read_text().replace("megatron_ttrace.enable()", "pass"))
    refuses(checkout, "'pass .*' is in the way, expected 'megatron_ttrace.enable", "--reverse")
    refuses(checkout, "the patched lines were edited")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("pretrain_gpt.py", "import megatron_ttrace\n", "is in the way: it was added by hand"),
        ("pretrain_gpt.py", "", "the file ends, expected"),
        ("pretrain_gpt.py", None, "pretrain_gpt.py cannot be read .No such file"),
        ("megatron/core/package_info.py", "MAJOR = 0\n", "package_info.py: no version found"),
        ("megatron/core/package_info.py", None, "not a checkout of Megatron-LM: it has no "),
    ],
)
def test_what_is_no_checkout(tmp_path: Path, file: str, content: str | None, message: str) -> None:
    """A file that is missing, cut off, or edited by hand."""
    folder = stand_in(tmp_path / "Megatron-LM", RELEASES[-1])
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(content)
    refuses(folder, message)


def test_a_pipe(tmp_path: Path) -> None:
    """Nobody waits for what comes out of it."""
    folder = stand_in(tmp_path / "Megatron-LM", RELEASES[-1])
    (folder / "pretrain_gpt.py").unlink()
    os.mkfifo(folder / "pretrain_gpt.py")
    with pytest.raises(TTraceError, match="not a regular file"):
        run(folder)


def test_unknown_release(tmp_path: Path) -> None:
    """The patch supports what a run supports, and says the same of the rest."""
    folder = stand_in(tmp_path / "new", "0.23.0")
    refuses(folder, re.escape(versions.refusal("0.23.0")))


def test_later_patch_release(tmp_path: Path) -> None:
    """The branch of a series counts on after the tag, and keeps the series' patch."""
    assert run(stand_in(tmp_path / "new", "0.19.3")) == 0


@pytest.mark.parametrize("release", RELEASES)
def test_git_agrees(release: str, tmp_path: Path) -> None:
    """The files are patches that git takes too, and git's result is ours."""
    mine, gits = (stand_in(tmp_path / name, release) for name in ("mine", "gits"))
    lines = (mine / "pretrain_gpt.py").read_text().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if line.startswith("_PROGRAM"))
    path = resources.patches_dir() / "megatron-lm" / f"core_v{release}.patch"
    start = script_patch.parse(path.read_text()).start
    for folder in (mine, gits):  # as far down as in the real script
        (folder / "pretrain_gpt.py").write_text("\n" * (start - at) + "".join(lines))
    run(mine)
    subprocess.run(["git", "init", "-q", "."], cwd=gits, check=True)
    subprocess.run(["git", "apply", str(path)], cwd=gits, check=True)
    assert (mine / "pretrain_gpt.py").read_bytes() == (gits / "pretrain_gpt.py").read_bytes()


def test_patches_are_small() -> None:
    """Fewer than ten lines each, none below megatron/, and hardly a line quoted."""
    paths = sorted((resources.patches_dir() / "megatron-lm").glob("*.patch"))
    assert [path.stem.removeprefix("core_v") for path in paths] == RELEASES
    for path in paths:
        patch = script_patch.parse(path.read_text())
        assert patch.path == "pretrain_gpt.py"
        assert 0 < len(patch.after) - len(patch.before) < 10
        assert len(patch.before) <= 2


def test_not_a_patch() -> None:
    """Text that is not a patch is refused rather than applied as nothing."""
    with pytest.raises(ValueError, match="not a unified diff"):
        script_patch.parse("--- a/x.py\n+++ b/x.py\n")
