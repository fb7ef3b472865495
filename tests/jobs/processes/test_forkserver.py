# SPDX-License-Identifier: Apache-2.0
"""Forked ranks behave like started ones; a forked rank can request a reference run."""

import argparse
import contextlib
import gc
import inspect
import json
import select
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron_ttrace.jobs.processes import forkserver
from tests import programs


def in_fresh_process(tmp_path, code, *arguments):
    """Run ``code`` in a small process: it forks, and pytest must not be forked."""
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(code))
    done = programs.python(script, tmp_path, *arguments, timeout=600, code=0)
    return done.stdout


PARENT = """
import os, sys
from pathlib import Path
from megatron_ttrace.jobs.processes import forkserver
here = Path(sys.argv[1])
pid = forkserver.fork(
    ["python", str(here / "child.py"), "one", "two"],
    {"PATH": "/nowhere", "ONLY": "this"},
    here / "log",
)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.parametrize(
    ("ending", "code", "says"),
    [
        ("", 0, ""),
        ("sys.exit(0)", 0, ""),
        ("sys.exit(None)", 0, ""),
        ("sys.exit(2)", 2, ""),
        ("sys.exit('words')", 1, "words"),
        ("raise ValueError('broken')", 1, "ValueError: broken"),
        ("raise KeyboardInterrupt", 1, "KeyboardInterrupt"),
        ("os._exit(5)", 5, ""),
        ("os.kill(os.getpid(), 9)", -9, ""),
    ],
)
def test_exit_codes(tmp_path, ending, code, says):
    """Exit codes as the interpreter's; messages and tracebacks are in the log."""
    (tmp_path / "child.py").write_text(f"import os, sys\nprint('here', flush=True)\n{ending}\n")
    assert int(in_fresh_process(tmp_path, PARENT)) == code
    log = (tmp_path / "log").read_text()
    assert log.startswith("here")
    assert says in log


def test_a_fork_looks_like_a_started_script(tmp_path):
    """Its own arguments, name, folder, environment and process group."""
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    (tmp_path / "child.py").write_text(
        "import json, os, sys, beside\n"
        "names = [n for n in ('__main__', '__mp_main__') if vars(sys.modules[n]) is globals()]\n"
        "print(json.dumps([__name__, sys.argv[1:], dict(os.environ), beside.VALUE,\n"
        "                  os.getpgid(0) == os.getpid(), names]))\n"
    )
    assert in_fresh_process(tmp_path, f"import multiprocessing.process\n{PARENT}") == "0\n"
    name, arguments, environment, value, leads, names = json.loads((tmp_path / "log").read_text())
    assert (name, arguments, value, leads) == ("__main__", ["one", "two"], 7, True)
    assert names == ["__main__", "__mp_main__"]
    assert environment.items() >= {"PATH": "/nowhere", "ONLY": "this"}.items()
    assert "PYTHONPATH" not in environment


def test_a_rank_asks_and_is_answered(tmp_path, monkeypatch):
    """The request is sent in a file: command lines can be larger than a packet."""
    command = ["python", "s.py", "x" * 300000]
    ranks = [({"A": "b"}, tmp_path / "reference.log"), ({"A": "c"}, Path("other"))]
    with contextlib.closing(forkserver.Requests()) as requests, ThreadPoolExecutor() as pool:
        assert requests.poll() is None
        assert not forkserver.available()
        for name, value in requests.environment.items():
            monkeypatch.setenv(name, value)
        assert forkserver.available()
        answer = pool.submit(forkserver.request_ranks, command, ranks, 300.0)
        select.select([requests], [], [], 300)
        assert requests.poll() == (command, ranks)
        requests.answer(2, 1)
        assert answer.result() == (2, 1)


def test_a_log_that_cannot_be_made(tmp_path):
    """The child ends in silence: its parent says why."""
    code = """
    import os, sys
    from pathlib import Path
    from megatron_ttrace.jobs.processes import forkserver
    from megatron_ttrace.trace import owned

    def full(*args):
        raise OSError(28, "No space left on device")

    owned.create = full
    os.dup2(1, 2)
    child = forkserver.fork(["python", "x.py"], {}, Path(sys.argv[1], "rank-00000.log"))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert in_fresh_process(tmp_path, code) == "1\n"


def helps() -> dict[str, str | None]:
    """The help texts of Megatron's flags."""
    arguments = pytest.importorskip("megatron.training.arguments")
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return {action.dest: action.help for action in parser._actions}


def test_help_texts_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flags are the same, and no source is read."""
    from megatron.training import argument_utils

    factory = argument_utils.ArgumentGroupFactory
    texts = helps()
    monkeypatch.setattr(factory, "_get_field_docstrings", factory._get_field_docstrings)
    forkserver._leave_out_help_texts()
    monkeypatch.setattr(inspect, "getsource", None)
    assert helps().keys() == texts.keys()
    assert len([*filter(None, helps().values())]) < len([*filter(None, texts.values())])


@pytest.mark.parametrize(
    ("words", "accepted"),
    [
        ((), True),
        (("--num-layers", "2", "--bf16"), True),
        (("--num-layers", "2", "--no-such-flag"), False),
        (("--num-layers", "two"), False),
        (("--num-layer", "2"), False),
    ],
)
def test_accepted_arguments(words, accepted, capsys):
    """Megatron's parser decides, and nothing is printed."""
    forkserver._parser()
    capsys.readouterr()  # torch, when it is imported, where there is a compiler for GPUs but none
    assert forkserver.accepts(words) is accepted
    assert capsys.readouterr() == ("", "")


def test_a_parser_that_cannot_be_made(monkeypatch):
    """Two flags of a fork have the same name: the ranks say where."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--twice")
    monkeypatch.setattr(forkserver, "_parser", lambda: parser.add_argument("--twice"))
    assert not forkserver.accepts([])


def test_a_package_is_imported_when_it_is_first_used(tmp_path, monkeypatch):
    """Neither its file nor a comparison is a use; a module in it is, and comes after it."""
    package = tmp_path / "deferred_package"
    package.mkdir()
    (package / "__init__.py").write_text("loaded = True\n")
    (package / "inner.py").write_text("from deferred_package import loaded\n")
    monkeypatch.syspath_prepend(tmp_path)
    forkserver._defer("deferred_package")
    forkserver._defer("deferred_package_that_is_not_installed")
    assert "deferred_package_that_is_not_installed" not in sys.modules
    module = sys.modules["deferred_package"]
    inspect.getmodule(test_a_package_is_imported_when_it_is_first_used, "unknown")
    assert module.__file__ == str(package / "__init__.py")
    assert module != package
    assert "loaded" not in vars(module)
    import deferred_package.inner

    assert deferred_package is module
    assert deferred_package.inner.loaded
    for name in ("deferred_package", "deferred_package.inner"):
        del sys.modules[name]


def test_a_broken_package_is_no_module(tmp_path, monkeypatch):
    """Its first use fails as its import does, each time."""
    package = tmp_path / "deferred_broken"
    package.mkdir()
    (package / "__init__.py").write_text("import no_such_module_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    forkserver._defer("deferred_broken")
    with pytest.raises(ImportError, match="no_such_module_at_all"):
        _ = sys.modules["deferred_broken"].anything
    assert "deferred_broken" not in sys.modules


GPU = """
import os, sys
from pathlib import Path
from megatron_ttrace.jobs.processes import forkserver
before = dict(os.environ)
forkserver.preload(Path(sys.argv[1], "train.py"), on_cpu=False)
print("megatron.training.training" in sys.modules, forkserver.is_gpu_unused())
print("PYTORCH_NVML_BASED_CUDA_CHECK" in os.environ)
from megatron_ttrace import cpu
from megatron_ttrace.jobs import provenance
print(cpu.active(), bool(provenance._folder))
import torch
asked = []
torch.backends.cuda.is_built = lambda: True
for has_gpu in (True, False):
    torch.cuda.is_available = lambda: bool(asked.append(1)) or has_gpu
    print(forkserver.needs_cpu("auto"), len(asked), forkserver.needs_cpu("cpu"))
"""


def test_imports_without_the_cpu_backend(tmp_path):
    """For ranks on GPUs: nothing of the GPU's driver is used, and no variable is left behind.

    Nor has a run begun: each rank's has a folder and variables of its own. A child asks whether
    there is a GPU, so this process can still fork others that use it.
    """
    *imported, on_gpu, on_cpu = in_fresh_process(tmp_path, GPU).splitlines()
    assert " ".join(imported).split() == ["True", "True", "False", "False", "False"]
    assert (on_gpu, on_cpu) == ("False 0 True", "True 0 True")


@pytest.mark.parametrize("initialised", [False, True])
def test_a_driver_that_an_import_used(monkeypatch, initialised):
    """It answers, which it does not before somebody has initialised it."""

    class Driver:
        def __init__(self, name):
            assert name == "libcuda.so.1"

        def cuDeviceGetCount(self, count):  # noqa: N802
            return 0 if initialised else 3

    monkeypatch.setattr(forkserver.ctypes, "CDLL", Driver)
    assert forkserver.is_gpu_unused() is not initialised


def test_what_was_imported_is_not_searched_for_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(inspect, "findsource", lambda thing: read.append(thing))
    before = inspect.getframeinfo
    frozen = gc.get_freeze_count()
    try:
        with forkserver.light_imports():
            assert not gc.isenabled()
            here = inspect.getframeinfo(sys._getframe(), 3)
        assert gc.isenabled()
        assert gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()
    assert inspect.getframeinfo is before
    assert (here.filename, here.code_context, read) == (__file__, None, [])
