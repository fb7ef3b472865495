# SPDX-License-Identifier: Apache-2.0
"""bootstrap.sh finds a working Python and makes an environment once, with a stand-in for pip."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import programs

ROOT = Path(__file__).parents[2]
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
REAL = Path(sys._base_executable)  # type: ignore[attr-defined]

RUNS = f'#!/bin/bash\nexec {REAL} "$@"\n'

# Stands for the new environment's python: "installs" by writing a log, fails when told to.
FAKE_PYTHON = f"""\
#!/bin/bash
case "$*" in
  *"-m venv "*) mkdir -p "${{@: -1}}/bin"; cp "$0" "${{@: -1}}/bin/python" ;;
  *"-m pip "*) echo "$*" >>"$PIP_LOG"; [[ ! -e $PIP_LOG.fails ]] ;;
  *) exec {REAL} "$@" ;;
esac
"""


class Machine:
    """A PATH, a home and a checkout of our own making, so that nothing real is found."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.home, self.checkout = folder / "bin", folder / "home", folder / "checkout"
        self.bin.mkdir(parents=True)
        self.home.mkdir()
        for tool in ("bash", "cat", "cksum", "dirname", "ls", "mkdir", "rm", "touch", "cp"):
            found = shutil.which(tool)
            assert found is not None
            (self.bin / tool).symlink_to(found)
        names = [
            "launch/bootstrap.sh",
            "pyproject.toml",
            "setup.py",
            "megatron_ttrace/compare/sums.c",
            "requirements/constraints.txt",
            "requirements/bridge.txt",
            "requirements/verl.txt",
        ]
        for name in names:
            (self.checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.checkout / name)
        self.log = folder / "pip.log"

    def add(self, name: str, text: str, under: Path | None = None) -> Path:
        return programs.executable((under or self.bin) / name, text)

    def run(self, *action: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.checkout / "launch" / "bootstrap.sh", *action],
            env={"PATH": self.bin, "HOME": self.home, "PIP_LOG": self.log, **environment},
            capture_output=True,
            text=True,
            timeout=600,
        )

    def fake_installs(self) -> None:
        """Let the stand-in be found although its sys.executable is the real one."""
        python = self.add(f"python{VERSION}", FAKE_PYTHON)
        script = self.checkout / "launch" / "bootstrap.sh"
        text = script.read_text()
        assert text.count("python=$(find_python)") == 1
        script.write_text(text.replace("python=$(find_python)", f"python={python}"))

    def installs_beside(self) -> None:
        """Let the stand-in make the folder of what is put beside an existing environment."""
        self.add("mv", f'#!/bin/bash\nexec {shutil.which("mv")} "$@"\n')
        made = 'all="$*"; to=${all#*--target }; mkdir "${to%% *}"; '
        installs = FAKE_PYTHON.replace('-m pip "*) ', f'-m pip "*) {made}')
        self.add("python", installs, self.checkout / ".venv" / "bin")

    def installs(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_none(machine: Machine) -> None:
    """Without a Python: exit code 2, one line, and how to get one."""
    done = machine.run("python")
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert "pyenv install 3.12" in done.stderr


def test_too_old(machine: Machine) -> None:
    """The default python3 is not taken when it is of another version."""
    machine.add("python3", "#!/bin/bash\n[[ $* != *3.1* ]]\n")
    assert machine.run("python").returncode == 2


@pytest.mark.parametrize("name", [f"python{VERSION}", "python3", "python"])
def test_on_path(machine: Machine, name: str) -> None:
    """It is found under any name on PATH; the real interpreter is printed."""
    machine.add(name, RUNS)
    done = machine.run("python")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).samefile(REAL)


def test_shim_that_does_not_run(machine: Machine) -> None:
    """pyenv's shim also exists for inactive versions: the version itself is used."""
    machine.add(f"python{VERSION}", "#!/bin/bash\necho 'pyenv: command not found' >&2\nexit 127\n")
    machine.add("python", RUNS, machine.home / ".pyenv" / "versions" / f"{VERSION}.9" / "bin")
    assert machine.run("python").returncode == 0


def test_pyenv_root(machine: Machine, tmp_path: Path) -> None:
    """pyenv need not be in the home directory."""
    machine.add("python", RUNS, tmp_path / "pyenv" / "versions" / f"{VERSION}.0" / "bin")
    assert machine.run("python").returncode == 2
    assert machine.run("python", PYENV_ROOT=str(tmp_path / "pyenv")).returncode == 0


def test_uv(machine: Machine) -> None:
    """A Python that only uv knows of."""
    hidden = machine.add("python-of-uv", RUNS, machine.home)
    machine.add("uv", f'#!/bin/bash\n[[ "$*" == *{VERSION} ]] && echo {hidden}\n')
    assert machine.run("python").returncode == 0


def test_named(machine: Machine) -> None:
    """TTRACE_PYTHON is used or refused, never ignored."""
    good = machine.add("mine", RUNS, machine.home)
    assert machine.run("python", TTRACE_PYTHON=str(good)).returncode == 0
    machine.add("python3", RUNS)
    refused = machine.run("python", TTRACE_PYTHON=str(machine.home / "absent"))
    assert refused.returncode == 2
    assert "absent is not a CPython 3.12 or 3.13" in refused.stderr


def test_second_run_installs_nothing(machine: Machine) -> None:
    """Pinned versions are installed once, and again only if the requirements changed."""
    machine.fake_installs()
    first = machine.run("venv")
    assert first.returncode == 0, first.stderr
    assert machine.installs() > 0
    for line in machine.log.read_text().splitlines():
        assert "-c requirements/constraints.txt" in line
    made = machine.installs()
    assert machine.run("venv").returncode == 0
    assert machine.installs() == made
    with (machine.checkout / "requirements/constraints.txt").open("a") as file:
        file.write("# renewed\n")
    assert machine.run("venv").returncode == 0
    assert machine.installs() > made


def test_half_made_environment_is_made_again(machine: Machine) -> None:
    """An interrupted installation is repeated."""
    machine.fake_installs()
    fails = Path(f"{machine.log}.fails")
    fails.touch()
    assert machine.run("venv").returncode != 0
    left = machine.checkout / ".venv" / "half-a-package"
    left.touch()
    fails.unlink()
    assert machine.run("venv").returncode == 0
    assert not left.exists()


def test_foreign_environment_is_left_alone(machine: Machine) -> None:
    """A .venv that was not made by this script is neither used nor removed."""
    theirs = machine.add("python", RUNS, machine.checkout / ".venv" / "bin")
    done = machine.run("venv")
    assert done.returncode == 2
    assert ".venv exists and was not created by make" in done.stderr
    assert theirs.exists()
    assert machine.installs() == 0


def test_a_release_is_put_beside_the_environment_once(machine: Machine) -> None:
    """Only that package, without its dependencies; its folder is printed for PYTHONPATH."""
    machine.installs_beside()
    missing = machine.run("release", "0.18.2", VENV="absent")
    assert missing.returncode == 2
    assert "make venv" in missing.stderr
    first = machine.run("release", "0.18.2")
    assert first.returncode == 0, first.stderr
    folder = Path(first.stdout.strip())
    assert folder.is_dir()
    assert folder == machine.checkout / ".venv" / "releases" / "0.18.2"
    assert "--no-deps" in machine.log.read_text()
    assert "megatron-core==0.18.2" in machine.log.read_text()
    assert machine.run("release", "0.18.2").stdout == first.stdout
    assert machine.installs() == 1


@pytest.mark.parametrize("release", ["", "latest", "0.18.2; true", "../0.18.2"])
def test_what_is_no_release_is_refused(machine: Machine, release: str) -> None:
    """One line, exit code 2, nothing installed."""
    done = machine.run("release", release)
    assert done.returncode == 2
    assert "not a release of megatron-core" in done.stderr
    assert machine.installs() == 0


@pytest.mark.parametrize("name", ["bridge", "verl"])
def test_a_trainer_is_put_beside_the_environment_once(machine: Machine, name: str) -> None:
    """What its file lists, and nothing that those packages declare; again if the file changed."""
    machine.installs_beside()
    first = machine.run(name)
    assert first.returncode == 0, first.stderr
    folder = Path(first.stdout.strip())
    assert folder.is_dir()
    assert folder.parent == machine.checkout / ".venv" / "releases"
    assert "--no-deps" in machine.log.read_text()
    assert f"-r requirements/{name}.txt" in machine.log.read_text()
    assert machine.run(name).stdout == first.stdout
    assert machine.installs() == 1
    with (machine.checkout / f"requirements/{name}.txt").open("a") as file:
        file.write("# renewed\n")
    assert machine.run(name).stdout != first.stdout
    assert machine.installs() == 2
