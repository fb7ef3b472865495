# SPDX-License-Identifier: Apache-2.0
"""Rules that hold for every committed file, each with a sample that breaks it."""

import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests import programs

ROOT = Path(__file__).parents[1]
Rule = Callable[[str, str], Iterator[str]]

TOP_LEVEL = {
    ".ci",
    ".editorconfig",
    ".gitattributes",
    ".github",
    ".gitignore",
    ".pre-commit-config.yaml",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "MANIFEST.in",
    "Makefile",
    "README.md",
    "docs",
    "launch",
    "megatron_ttrace",
    "mkdocs.yml",
    "patches",
    "pyproject.toml",
    "requirements",
    "setup.py",
    "tests",
}
MAX_LINES = 500
MAX_BYTES = 1_000_000
# Written in pieces, so that this file keeps the rules too.
MACHINE_PATHS = re.compile(r"(?<![\w.~-])/(wor" + r"k|roo" + r"t|tmp/ven" + r"v|opt/pyp" + r"i)\b")
REGISTRIES = re.compile(
    r"pypi\.or"
    + r"g|pythonhoste"
    + r"d|npmjs\.|ngc\.nvidi"
    + r"a|download\.pytorc"
    + r"h|index-ur"
    + r"l"
)


def tracked() -> list[str]:
    """Committed and staged files."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    return [path for path in listed.split("\0") if path and (ROOT / path).is_file()]


def content_of(path: str) -> str | None:
    """The text, or None for a binary file."""
    data = (ROOT / path).read_bytes()
    return None if b"\0" in data[:8000] else data.decode()


def top_level(path: str, text: str) -> Iterator[str]:
    """Only known folders and files at the top level."""
    if path.split("/")[0] not in TOP_LEVEL:
        yield "does not belong at the top of the tree"


def lines_with(pattern: re.Pattern[str], text: str, what: str) -> Iterator[str]:
    """Where it occurs."""
    for number, line in enumerate(text.splitlines(), start=1):
        if pattern.search(line):
            yield f"line {number}: {what}"


def no_machine_paths(path: str, text: str) -> Iterator[str]:
    """No paths of one machine."""
    return lines_with(MACHINE_PATHS, text, "a path of one machine")


def no_registries(path: str, text: str) -> Iterator[str]:
    """No package index: that is the machine's configuration."""
    return lines_with(REGISTRIES, text, "names a package registry")


def licence_header(path: str, text: str) -> Iterator[str]:
    """Every source file begins with the licence."""
    if path.endswith((".py", ".sh")) and text:
        lines = [line for line in text.splitlines() if not line.startswith("#!")]
        if lines[:1] != ["# SPDX-License-Identifier: Apache-2.0"]:
            yield "lacks the SPDX line at its head"


def length(path: str, text: str) -> Iterator[str]:
    """No long modules, unless a reason is stated."""
    lines = len(text.splitlines())
    reason = f"# over {MAX_LINES} lines because:"
    if path.endswith(".py") and lines > MAX_LINES and reason not in text:
        yield f"{lines} lines, and no '{reason}'"


def white_space(path: str, text: str) -> Iterator[str]:
    """No trailing white space, and a newline at the end."""
    if path.endswith((".patch", ".svg")) or path == "LICENSE":
        return
    if text and (not text.endswith("\n") or text.endswith("\n\n")):
        yield "should end with one newline"
    for number, line in enumerate(text.split("\n"), start=1):
        if line != line.rstrip():
            yield f"line {number}: white space at its end"
        if line.startswith("\t") and path != "Makefile":
            yield f"line {number}: indented by a tab"


def no_pickle(path: str, text: str) -> Iterator[str]:
    """Nothing asks numpy for pickles; ruff bans modules and functions (pyproject.toml)."""
    if path.startswith(("megatron_ttrace/", "launch/")) and "allow_pickle" in text:
        yield "allow_pickle"


LONG = "# SPDX-License-Identifier: Apache-2.0\n" + "x = 1\n" * MAX_LINES
BROKEN: list[tuple[Rule, str, str]] = [
    (top_level, "notes.txt", ""),
    (top_level, "scripts/run.py", ""),
    (no_machine_paths, "docs/a.md", "cd " + "/wor" + "k/main\n"),
    (no_machine_paths, "tests/a.py", "'" + "/roo" + "t/.cache'\n"),
    (no_registries, "requirements/a.txt", "--extra-index" + "-url somewhere\n"),
    (no_registries, "docs/a.md", "see pypi" + ".org\n"),
    (licence_header, "tests/a.py", '"""No header."""\n'),
    (licence_header, "launch/a.sh", "#!/bin/bash\necho\n"),
    (length, "megatron_ttrace/a.py", LONG),
    (white_space, "a.py", "x = 1 \n"),
    (white_space, "a.py", "x = 1"),
    (white_space, "a.py", "x = 1\n\n"),
    (white_space, "a.py", "if x:\n\ty = 1\n"),
    (white_space, "a.py", "x = 1\r\n"),
    (no_pickle, "launch/a.py", "numpy.load(path, allow_pickle=True)\n"),
]
FINE: list[tuple[Rule, str, str]] = [
    (top_level, "docs/deep/a.md", ""),
    (no_machine_paths, "docs/a.md", "cd /workspace; ls ~/work docs/work ./root https://x.y/root\n"),
    (licence_header, "launch/a.sh", "#!/bin/bash\n# SPDX-License-Identifier: Apache-2.0\n"),
    (length, "megatron_ttrace/a.py", LONG + f"# over {MAX_LINES} lines because: one table\n"),
]
RULES = list(dict.fromkeys(rule for rule, _, _ in BROKEN))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule(rule: Rule) -> None:
    """Every committed file keeps the rule."""
    files = tracked()
    assert "pyproject.toml" in files
    complaints = [
        f"{path}: {complaint}"
        for path in files
        if (text := content_of(path)) is not None
        for complaint in rule(path, text)
    ]
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize(("rule", "path", "text"), BROKEN)
def test_rule_finds(rule: Rule, path: str, text: str) -> None:
    """The rule can fail."""
    assert list(rule(path, text))


@pytest.mark.parametrize(("rule", "path", "text"), FINE)
def test_rule_allows(rule: Rule, path: str, text: str) -> None:
    """The rule allows similar files."""
    assert not list(rule(path, text))


def test_files_are_small() -> None:
    """Pictures, too."""
    large = [path for path in tracked() if (ROOT / path).stat().st_size > MAX_BYTES]
    assert not large


def test_executable() -> None:
    """Scripts are executable, in a clone too."""
    staged = subprocess.run(
        ["git", "ls-files", "--stage"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    modes = {line.split("\t")[1]: line.split()[0] for line in staged.splitlines()}
    scripts = [path for path in modes if path.endswith(".sh") or path == ".ci/run"]
    assert len(scripts) >= 2
    assert {modes[path] for path in scripts} == {"100755"}


def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def requirements() -> list[Requirement]:
    """Requirements of users, and those of the tests in addition."""
    found = project()
    texts = [*found["dependencies"], *found["optional-dependencies"]["test"]]  # type: ignore[misc,index]
    return [Requirement(text) for text in texts]


def pins(file: str = "constraints.txt") -> dict[str, str]:
    lines = (ROOT / "requirements" / file).read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_everything_needed_is_pinned() -> None:
    """Each requirement is pinned to a version that satisfies it."""
    for requirement in requirements():
        pinned = pins().get(canonicalize_name(requirement.name))
        assert pinned is not None, f"{requirement.name} has no pin"
        assert requirement.specifier.contains(pinned, prereleases=True), requirement


def test_megatron_bridge_comes_on_top() -> None:
    """Its pin is what the extra asks for; it replaces no package of the environment."""
    extras = project()["optional-dependencies"]
    (bridge,) = map(Requirement, extras["bridge"])  # type: ignore[index]
    assert bridge.specifier.contains(pins("bridge.txt")[bridge.name])
    assert not pins("bridge.txt").keys() & {*pins(), "apex"}
    assert not pins("verl.txt").keys() & {*pins(), *pins("bridge.txt"), "apex"}


def test_no_foreign_apex() -> None:
    """The index package of that name is another project's."""
    names = {canonicalize_name(requirement.name) for requirement in requirements()} | pins().keys()
    extras = project()["optional-dependencies"]
    names |= {canonicalize_name(Requirement(text).name) for text in extras["gpu"]}  # type: ignore[index]
    assert "apex" not in names
    assert "transformer-engine" in names


def test_supported_releases_are_those_of_the_requirement() -> None:
    """The code, the requirement and the patches name the same releases of Megatron."""
    from megatron_ttrace.mcore.versions import KNOWN

    megatron = next(found for found in requirements() if found.name == "megatron-core")
    assert all(release in megatron.specifier for release in KNOWN)
    assert pins()["megatron-core"] in KNOWN
    patches = {path.stem for path in (ROOT / "patches" / "megatron-lm").glob("*.patch")}
    assert patches == {f"core_v{release}" for release in KNOWN}


def test_licence_is_whole() -> None:
    """The full text of Apache 2.0."""
    text = (ROOT / "LICENSE").read_text()
    for heading in ("Version 2.0, January 2004", "1. Definitions.", "9. Accepting Warranty"):
        assert heading in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_ci_is_make_test() -> None:
    """CI runs ``make test``."""
    assert (ROOT / ".ci" / "run").read_text().rstrip().endswith("exec make test")


def test_make_needs_no_network_for_help() -> None:
    """`make help` lists every target that has a purpose."""
    done = subprocess.run(["make", "help"], cwd=ROOT, check=True, capture_output=True, text=True)
    listed = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("  make ")}
    text = (ROOT / "Makefile").read_text()
    phony = next(line for line in text.splitlines() if line.startswith(".PHONY:"))
    assert listed == set(phony.split()[1:])
    assert {"demo", "test"} <= listed


@pytest.mark.slow
def test_wheel(tmp_path: Path) -> None:
    """A wheel has the patches and the script, and finds them; no tests, and what C compiles to."""
    source, unpacked = tmp_path / "source", tmp_path / "unpacked"
    for path in tracked():
        target = source / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, target)
    (source / "README.md").touch()
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    command = [sys.executable, "-c", build, str(tmp_path)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(unpacked)
    assert not [name for name in names if name.split("/")[0] in ("tests", "patches", "launch")]
    files = {path for path in tracked() if path.startswith("megatron_ttrace/")}
    missing = [path for path in files - names if not path.endswith(".c")]
    assert not missing, "files of the package are missing from the wheel"
    program = (
        "from megatron_ttrace.jobs import resources as r; print(r.patches_dir(), r.launch_dir())"
    )
    done = programs.python("-c", program, cwd=tmp_path, PYTHONPATH=str(unpacked))
    patches, launch = map(Path, done.stdout.split())
    assert patches.is_relative_to(unpacked)
    assert (patches / "megatron-lm" / "core_v0.19.2.patch").is_file()
    assert (launch / "pretrain_gpt.py").is_file()


def test_an_old_python_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before pip looks for dependencies, of which it would list all versions."""
    monkeypatch.setattr(sys, "version_info", (3, 11, 7))
    with pytest.raises(SystemExit, match=r"needs Python 3\.12 or newer.* 3\.11: use"):
        runpy.run_path(str(ROOT / "setup.py"))
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert requires == ">=3.12"


LINES = {"megatron_ttrace": 71_464, "tests": 72_240}
"""Lines of Python. They only fall; a feature that raises one says so in its commit."""


@pytest.mark.parametrize("folder", LINES)
def test_lines(folder: str) -> None:
    """What is added takes the place of something; lower the number when there is less."""
    paths = [path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts]
    lines = sum(path.read_bytes().count(b"\n") for path in paths)
    assert LINES[folder] - 300 < lines <= LINES[folder]
