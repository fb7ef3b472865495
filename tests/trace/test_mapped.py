# SPDX-License-Identifier: Apache-2.0
"""The tensors of a safetensors file are the ones that safetensors itself reads."""

import os
import re
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from megatron_ttrace.trace import compiled
from megatron_ttrace.trace.mapped import MappedFile
from tests import programs, warm
from tests.trace.traces import bits

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.float8_e5m2, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    *(torch.bool, torch.uint16, torch.complex64),
)
"""The last two are left to safetensors."""


@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=5),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=4)),
        min_size=1,
        max_size=6,
    )
)
def test_every_tensor(tmp_path_factory, shapes):
    """Of any names, dtypes and shapes, in any order."""
    path = tmp_path_factory.mktemp("mapped") / "file.safetensors"
    made = {name: (torch.rand(shape) * 50).to(dtype) for name, (dtype, shape) in shapes.items()}
    save_file(made, path)
    mapped, theirs = MappedFile(path), load_file(path)
    assert sorted(mapped.names) == sorted(theirs)
    for name, expected in theirs.items():
        for tensor in (mapped.get(name), mapped.get(name)):
            assert tensor is not None
            assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape)
            assert bits(tensor) == bits(expected) == bits(made[name])
    assert sorted(mapped.names) == sorted(theirs)
    assert mapped.get("no such name") is None


@pytest.mark.parametrize("left", [5, 20, -1])
def test_a_shortened_file(tmp_path, left):
    """Is refused when it is opened, not when it is read."""
    path = tmp_path / "file.safetensors"
    save_file({"a": torch.ones(5)}, path)
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(SafetensorError):
        MappedFile(path)


def test_a_tensor_outlives_its_file(tmp_path):
    """The mapping stays as long as one of its tensors."""
    path = tmp_path / "file.safetensors"
    save_file({"a": torch.arange(9)}, path)
    tensor = MappedFile(path).get("a")
    path.unlink()
    assert tensor.tolist() == list(range(9))


def test_pages_are_given_back(tmp_path):
    """Tensors stay, and are read again."""
    save_file({"a": torch.ones(1 << 20)}, tmp_path / "a.safetensors")
    mapped = MappedFile(tmp_path / "a.safetensors")
    tensor = mapped.get("a")
    assert tensor.sum() == 1 << 20
    used = resident(tensor.data_ptr())
    assert mapped.release()
    assert (used > 4000, resident(tensor.data_ptr()) < 100) == (True, True)
    assert tensor.sum() == 1 << 20
    assert mapped.get("a") is tensor


def resident(address):
    """Kilobytes of the mapping with this address that are in memory."""
    for block in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        begin, end = (int(at, 16) for at in block.partition(" ")[0].split("-"))
        if begin <= address < end:
            return int(re.search(r"Rss: +(\d+)", block)[1])
    return None


CHILD = """
import ctypes, faulthandler, mmap, os, signal, sys, threading
from pathlib import Path
import torch
from safetensors.torch import save_file
from megatron_ttrace.trace import mapped
from megatron_ttrace.trace.errors import TTraceError
path, case = Path(sys.argv[1]), sys.argv[2]
save_file({"a": torch.ones(1 << 20), "b": torch.ones(1 << 20)}, path)
if case == "handled":
    faulthandler.enable()
if case != "plain":
    print(mapped.survive(), flush=True)
file = mapped.MappedFile(path)
tensor = file.get("a")
if case == "killed":
    os.kill(os.getpid(), signal.SIGBUS)
if case == "another":
    with path.open("r+b") as opened:
        other = mmap.mmap(opened.fileno(), 0)
    os.truncate(path, 4096)
    other[1 << 20]
if case == "forgotten":
    place = tensor.data_ptr()
    del tensor, file
    with path.open("r+b") as opened:
        others = [mmap.mmap(opened.fileno(), 0) for _ in range(9)]
    os.truncate(path, 4096)
    sum(other[1 << 20] for other in others)
if case == "while reading":
    ready = threading.Event()
    def truncate():
        ready.wait()
        os.truncate(path, 1 << 20)
        os.truncate(path, 4096)
    thread = threading.Thread(target=truncate)
    thread.start()
    ready.set()
    while tensor.sum() == 1 << 20:
        pass
    thread.join()
else:
    os.truncate(path, 4096)
print(float(tensor[-1]), flush=True)
for ask in (lambda: file.get("b"), mapped.require_whole):
    try:
        ask()
    except (ValueError, TTraceError) as error:
        print("truncated" in str(error))
"""


@pytest.mark.skipif(compiled.load("trace.mapped") is None, reason="not compiled")
@pytest.mark.parametrize(
    ("case", "code", "printed"),
    [
        ("plain", -signal.SIGBUS, []),
        ("at once", 0, ["True", "0.0", "True", "True"]),
        ("while reading", 0, ["True", "0.0", "True", "True"]),
        ("handled", -signal.SIGBUS, ["False"]),
        ("killed", -signal.SIGBUS, ["True"]),
        ("another", -signal.SIGBUS, ["True"]),
        ("forgotten", -signal.SIGBUS, ["True"]),
    ],
)
def test_a_file_that_is_truncated_under_a_tensor(tmp_path, case, code, printed):
    """A process that survives reads zeros and knows it; nothing else of SIGBUS changes."""
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    words = (script, tmp_path / "a.safetensors", case)
    done = warm.run(words, cwd=tmp_path, env=programs.environment(), timeout=600)
    assert (done.returncode, done.stdout.split()) == (code, printed), done.stderr
    if case == "handled":
        assert "Fatal Python error: Bus error" in done.stderr


def test_a_file_that_becomes_shorter(tmp_path):
    """Another process truncates it: an error, where reading the mapping would end the process."""
    path = tmp_path / "there.safetensors"
    save_file({"a": torch.ones(1 << 16), "b": torch.ones(1 << 16)}, path)
    mapped = MappedFile(path)
    assert mapped.get("a").sum() == 1 << 16
    os.truncate(path, 4096)
    for name in ("a", "b"):
        with pytest.raises(ValueError, match="truncated"):
            mapped.get(name)
