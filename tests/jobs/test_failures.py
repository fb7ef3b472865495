# SPDX-License-Identifier: Apache-2.0
"""Where an exception was raised, what it follows from, and whether its fault is known."""

import json
import os
import sys
import types
from pathlib import Path

import pytest

from megatron_ttrace.jobs import failures, script
from megatron_ttrace.trace import codec, ends
from megatron_ttrace.trace.errors import TTraceError

FINDINGS = Path(__file__).parents[2] / "docs" / "findings.md"
VERSION = "MAJOR = 0\nMINOR = 19\nPATCH = 2\n"


@pytest.fixture
def megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is Megatron's, for files that a test writes."""
    folder = tmp_path / "site" / "megatron"
    for name in ("core", "training"):
        (folder / name).mkdir(parents=True)
        module = types.ModuleType(f"megatron.{name}")
        module.__file__ = str(folder / name / "__init__.py")
        module.__spec__ = types.SimpleNamespace(origin=module.__file__)  # type: ignore[assignment]
        monkeypatch.setitem(sys.modules, f"megatron.{name}", module)
    (folder / "core" / "package_info.py").write_text(VERSION)
    return folder


def raised(file: Path, code: str, name: str = "fail") -> BaseException:
    """What a function of a file raises."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(code)
    space: dict[str, object] = {}
    exec(compile(code, str(file), "exec"), space)
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - SystemExit among them
        space[name]()  # type: ignore[operator]
    return caught.value


@pytest.mark.parametrize("site", ["", "site-packages", "dist-packages"])
def test_the_innermost_frame_of_megatron(megatron: Path, tmp_path: Path, site: str) -> None:
    """Not the place in what Megatron called, of the standard library or any environment's."""
    called = "import json\ndef fail():\n    json.loads('')\n"
    if site:
        package = tmp_path / "other" / site / "package.py"
        package.parent.mkdir(parents=True)
        package.write_text("def load():\n    raise KeyError(1)\n")
        called = f"import runpy\ndef fail():\n    runpy.run_path({str(package)!r})['load']()\n"
    end = failures.record_of(raised(megatron / "core" / "layers.py", called), 1)
    assert end.error == ("KeyError" if site else "JSONDecodeError")
    assert [str(frame) for frame in end.frames][:1] == ["megatron/core/layers.py:3 in fail"]


def test_an_error_without_words(megatron: Path) -> None:
    """The line that raised it."""
    error = raised(megatron / "core" / "a.py", "def fail():\n    assert 1 == 2\n")
    end = failures.record_of(error, 1)
    assert end.message == "assert 1 == 2"


@pytest.mark.parametrize(("kind", "follows"), [("RuntimeError", True), ("ValueError", False)])
def test_what_a_collective_raises(tmp_path: Path, kind: str, follows: bool) -> None:
    """A lost connection is another rank's doing; a wrong argument is not."""
    file = tmp_path / "torch" / "distributed" / "c10d.py"
    error = raised(file, f"def fail():\n    raise {kind}('closed by peer')\n")
    assert failures.record_of(error, 1).follows is follows


@pytest.mark.parametrize(
    ("kind", "function", "interval", "finding"),
    [
        ("TypeError", "get_train_valid_test_num_samples", None, 32),
        ("TypeError", "get_train_valid_test_num_samples", 10, 0),
        ("ValueError", "get_train_valid_test_num_samples", None, 0),
        ("TypeError", "another", None, 0),
    ],
)
def test_a_known_fault(
    megatron: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    function: str,
    interval: int | None,
    finding: int,
) -> None:
    """By type, place and options, whatever the message is."""
    state = types.ModuleType("megatron.training.global_vars")
    state._GLOBAL_ARGS = types.SimpleNamespace(eval_interval=interval)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", state)
    code = f"def {function}():\n    raise {kind}('any words')\n"
    error = raised(megatron / "training" / "training.py", code, function)
    assert failures.record_of(error, 1).finding == finding


@pytest.mark.parametrize(
    ("file", "function", "kind", "finding"),
    [
        (
            "megatron/core/utils.py",
            "_get_batch_on_this_cp_rank_per_sequence_balancing",
            "IndexError",
            57,
        ),
        ("checkout/pretrain_gpt.py", "get_batch", "TypeError", 57),
        ("megatron/core/transformer/attention.py", "clip_qk", "RuntimeError", 57),
        ("megatron/core/transformer/mlp.py", "forward", "RuntimeError", 12),
    ],
)
def test_a_crash_that_arguments_do_not_refuse(
    megatron: Path,
    monkeypatch: pytest.MonkeyPatch,
    file: str,
    function: str,
    kind: str,
    finding: int,
) -> None:
    """Of Megatron's, or of its script in any folder."""
    state = types.ModuleType("megatron.training.global_vars")
    options = {"context_parallel_size": 2, "dataloader_inter_document_masking": True, "qk_clip": 1}
    options |= {"num_experts": 4, "add_bias_linear": True}
    state._GLOBAL_ARGS = types.SimpleNamespace(**options)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", state)
    code = f"def {function}():\n    raise {kind}('any words')\n"
    error = raised(megatron.parent / file, code, function)
    assert failures.record_of(error, 1).finding == finding


def test_known_faults_are_documented() -> None:
    """Each number is a heading of docs/findings.md."""
    text = FINDINGS.read_text()
    assert all(f"\n## {known.finding}. " in text for known in failures.KNOWN)


@pytest.mark.parametrize(
    ("code", "message", "error"),
    [
        ("raise KeyError('x')", "'x'", "KeyError"),
        ("import sys; sys.exit('no data')", "no data", "SystemExit"),
        ("import sys; sys.exit(3)", "", ""),
        ("def f(:", "invalid syntax (train.py, line 1)", "SyntaxError"),
    ],
)
def test_a_script_leaves_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, message: str, error: str
) -> None:
    """Whatever ends it; the variable is not inherited by what it starts."""
    file = tmp_path / "end.json"
    for name, value in ends.announced(file).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    (tmp_path / "train.py").write_text(code)
    with pytest.raises((SystemExit, KeyError, SyntaxError)):
        script.run(str(tmp_path / "train.py"), [], sys.path)
    end = ends.read(file)
    ends.begin()
    assert end is not None
    assert (end.message, end.error) == (message, error)
    assert ends.VARIABLE not in os.environ


def test_the_first_reason_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails while a process ends is not why it ends."""
    file = tmp_path / "end.json"
    monkeypatch.setenv(ends.VARIABLE, str(file))
    ends.begin()
    ends.tell("no room")
    ends.write(failures.record_of(TTraceError("lost the connection"), 2))
    ends.begin()
    end = ends.read(file)
    assert end is not None
    assert end.reason == "no room"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"code": "x"}', "\0", "9" * (1 << 21)])
def test_a_damaged_record(tmp_path: Path, text: str) -> None:
    """It is as good as none."""
    (tmp_path / "end.json").write_text(text)
    assert ends.read(tmp_path / "end.json") is None


def test_a_record_is_shown_harmlessly(tmp_path: Path) -> None:
    """Its text is foreign: no control characters, no endless lines."""
    record = ends.EndRecord(code=1, at=1, message="\x1b[31m" + "x" * 5000, error="ValueError")
    (tmp_path / "end.json").write_text(json.dumps(codec.encode(record)))
    end = ends.read(tmp_path / "end.json")
    assert end is not None
    assert end.reason.isprintable()
    assert len(end.reason) < 700
