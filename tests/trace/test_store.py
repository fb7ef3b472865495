# SPDX-License-Identifier: Apache-2.0
"""Traces survive the disk, and damaged ones are refused with one clear line."""

import errno
import json
import math
import re
import shutil
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from safetensors.torch import save_file

from megatron_ttrace.trace import codec, mapped, store
from megatron_ttrace.trace import index as index_module
from megatron_ttrace.trace.budget import Budget
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.records import Kind, TraceKey
from megatron_ttrace.trace.sealing import seal_json
from megatron_ttrace.trace.store import (
    TRACED,
    Entry,
    TraceReader,
    TraceWriter,
    announce,
    read_meta,
    seal,
)
from tests.trace import traces
from tests.trace.arbitrary import arbitrary


def key(name="a", **others):
    """A key."""
    return TraceKey(
        **{"iteration": 1, "microbatch": 0, "kind": Kind.OUTPUT, "name": name, **others}
    )


def entry(data, name="a", **others):
    """An index line for ``data``."""
    return Entry.of(key(name), data, **others)


def written(directory, tensors, **meta):
    """A sealed trace of the given tensors."""
    named = {key(name): data for name, data in tensors.items()}
    return traces.sealed(directory, named, {"role": "reference", **meta})


TENSORS = {
    "float32": torch.randn(3, 4),
    "float64": torch.randn(3, 4, dtype=torch.float64),
    "bfloat16": torch.randn(3, 4).bfloat16(),
    "float16": torch.randn(3, 4).half(),
    "e4m3": torch.randn(3, 4).to(torch.float8_e4m3fn),
    "e5m2": torch.randn(3, 4).to(torch.float8_e5m2),
    "int64": torch.tensor([2**62, -1]),
    "int32": torch.tensor([[1], [2]], dtype=torch.int32),
    "uint8": torch.tensor([0, 255], dtype=torch.uint8),
    "bool": torch.tensor([True, False, True]),
    "scalar": torch.tensor(1.5),
    "scalar bf16": torch.tensor(1.5, dtype=torch.bfloat16),
    "one": torch.ones(1, 1, 1),
    "empty": torch.zeros(0, 3),
    "transposed": torch.randn(4, 3).t(),
    "expanded": torch.randn(1, 3).expand(5, 3),
    "slice": torch.randn(9, 9)[2:5, ::2],
    "strange": torch.tensor([math.nan, math.inf, -math.inf, -0.0, 1e-45]),
    "with graph": torch.randn(2, requires_grad=True) * 2,
    "parameter": torch.nn.Parameter(torch.randn(2)),
}


def test_every_dtype_and_shape_survives_bit_for_bit(tmp_path):
    """All of them in one trace, in order."""
    reader = TraceReader(written(tmp_path, TENSORS))
    assert [k.name for k in reader] == list(TENSORS)
    for name, data in TENSORS.items():
        stored_entry = reader.entry(key(name))
        stored = reader.tensor(stored_entry)
        assert (stored.shape, stored.dtype) == (data.shape, data.dtype), name
        assert traces.bits(stored) == traces.bits(data), name
        assert stored_entry.shape == tuple(data.shape)
        assert stored_entry.dtype == str(stored.dtype).removeprefix("torch.")


def test_data_is_copied_when_it_is_added(tmp_path):
    """Training overwrites its buffers at once."""
    data = torch.ones(4)
    writer = TraceWriter(tmp_path, 0)
    writer.add(entry(data), data)
    data.zero_()
    writer.close()
    reader = TraceReader(tmp_path, sealed=False)
    assert reader.data(key()).tolist() == [1.0] * 4


def test_a_trace_that_is_read_early(tmp_path):
    """It is moved to its place while it is read, and known by that when it is complete."""
    aside, place = tmp_path / "aside", tmp_path / "place"
    writer = TraceWriter(aside, 0)
    writer.add(entry(torch.ones(4)), torch.ones(4))
    writer.close()
    with pytest.raises(OSError, match=TRACED):
        TraceReader.early(aside, Budget())
    announce(aside, {"loss_scales": {"1": 8.0}})
    reader = TraceReader.early(aside, Budget())
    seal(aside, {"seconds": 2.0})
    aside.rename(place)
    assert reader.data(key()).tolist() == [1.0] * 4
    assert (reader.is_complete, reader.reference.loss_scales) == (False, {"1": 8.0})
    reader.complete(place, TraceReader(place).checksum)
    assert (reader.is_complete, reader.reference.seconds) == (True, 2.0)
    assert (reader.directory, reader.files) == (place, TraceReader(place).files)
    assert reader.data(key()).tolist() == [1.0] * 4
    assert not (place / TRACED).exists()


def test_a_trace_that_ends_early(tmp_path):
    """Its files are gone with the run that wrote them, and are not called damaged."""
    writer = TraceWriter(tmp_path / "aside", 0)
    writer.add(entry(torch.ones(4)), torch.ones(4))
    writer.close()
    announce(tmp_path / "aside", {})
    reader = TraceReader.early(tmp_path / "aside", Budget())
    shutil.rmtree(tmp_path / "aside")
    with pytest.raises(TTraceError, match="the reference run ended"):
        reader.data(key())


def test_another_trace_than_the_one_that_was_read_early(tmp_path):
    """It is not the one whose checksum is announced."""
    for number in range(2):
        writer = TraceWriter(tmp_path / str(number), 0)
        writer.add(entry(torch.ones(4 + number)), torch.ones(4 + number))
        writer.close()
    announce(tmp_path / "0", {})
    reader = TraceReader.early(tmp_path / "0", Budget())
    seal(tmp_path / "1", {})
    with pytest.raises(TTraceError, match="is not the trace that was read"):
        reader.complete(tmp_path / "1", TraceReader(tmp_path / "1").checksum)


def test_chunks_bound_the_memory(tmp_path):
    """Full chunks are written meanwhile, and few wait for it; every tensor is found again."""
    writer = TraceWriter(tmp_path, 3, Budget(1600))
    for number in range(7):
        writer.add(entry(torch.zeros(20), str(number)), torch.full((20,), float(number)))
        written = len(list(tmp_path.glob("*.safetensors")))
        assert (number + 1) // 2 - 1 <= written <= (number + 1) // 2
    assert len(writer) == 7
    writer.close()
    seal(tmp_path, {})
    assert len(list(tmp_path.glob("rank-00003.*.safetensors"))) == 4
    reader = TraceReader(tmp_path)
    for number in range(7):
        assert reader.tensor(reader.entry(key(str(number)))).unique().tolist() == [float(number)]


@pytest.mark.parametrize("more", [0, 3])
def test_a_chunk_that_cannot_be_written(tmp_path, monkeypatch, more):
    """The error arrives where tensors are added, at the latest when the trace is closed."""

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megatron_ttrace.trace.store.save_file", full)
    writer = TraceWriter(tmp_path, 0, Budget(1))
    writer.add(entry(torch.zeros(4)), torch.zeros(4))

    def go_on():
        for number in range(more):
            writer.add(entry(torch.zeros(4), str(number)), torch.zeros(4))
        writer.close()

    with pytest.raises(OSError, match="No space left"):
        go_on()
    assert not list(tmp_path.glob("*.index.jsonl"))


def test_second_names_share_the_data(tmp_path):
    """``same_as`` points at an earlier line; one copy lies on the disk."""
    data = torch.randn(1000)
    writer = TraceWriter(tmp_path, 0)
    first = writer.add(entry(data, "a"), data)
    writer.add(entry(data, "b", same_as=first), None)
    writer.close()
    seal(tmp_path, {})
    reader = TraceReader(tmp_path)
    assert torch.equal(reader.tensor(reader.entry(key("b"))), data)
    assert reader.primary(key("b")) == reader.primary(key("a")) == key("a")
    [file] = tmp_path.glob("*.safetensors")
    assert file.stat().st_size < 2 * data.nbytes


def test_ranks_have_their_own_files(tmp_path):
    """Two ranks write one trace; each one's entries are known by its number."""
    for rank in (0, 11):
        traces.written(tmp_path, {key(f"of {rank}"): torch.full((2,), float(rank))}, rank=rank)
    seal(tmp_path, {"role": "candidate"})
    reader = TraceReader(tmp_path)
    assert {rank: [e.key.name for e in entries] for rank, entries in reader.ranks.items()} == {
        0: ["of 0"],
        11: ["of 11"],
    }
    assert reader.meta["role"] == "candidate"
    assert key("of 11") in reader
    assert key("of 1") not in reader
    with pytest.raises(KeyError):
        reader.entry(key("of 1"))


@given(arbitrary(Entry).filter(lambda line: line.logical_shape))
def test_index_lines_survive(line):
    """Every field, any text, through one line of JSON."""
    text = index_module.encode(line)
    assert "\n" not in text
    assert index_module.decode(json.loads(text)) == line


def test_a_reference_line_is_short():
    """What a reference does not need is not written."""
    line = json.loads(index_module.encode(Entry(key(), (2,), "float32", "f", "0")))
    assert set(line) == {"key", "shape", "dtype", "file", "tensor"}
    assert index_module.decode(line).logical_shape == (2,)


def read_all(directory):
    """Open a trace and read every tensor."""
    reader = TraceReader(directory)
    for key_of_tensor in reader:
        reader.tensor(reader.entry(key_of_tensor))


def refused(directory, says):
    """The trace is refused with one line that says ``says`` and what to do."""
    with pytest.raises(TTraceError, match=says) as error:
        read_all(directory)
    assert "\n" not in str(error.value)
    assert "run the traced job again" in str(error.value)


def data_file(directory):
    """The safetensors of a trace of one chunk."""
    [file] = directory.glob("*.safetensors")
    return file


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("rank-00000.0000.safetensors", b"half", r"is truncated \(4 of \d+ bytes\)"),
        ("rank-00000.0000.safetensors", None, "safetensors is missing"),
        ("rank-00000.index.jsonl", None, "index.jsonl is missing"),
    ],
)
def test_a_copy_that_is_not_whole(tmp_path, name, content, says):
    """A file is truncated or missing; a trace without its index is not an empty one."""
    written(tmp_path, {"a": torch.randn(50)})
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    refused(tmp_path, says)


def test_a_run_that_never_ended(tmp_path):
    """No ``meta.json``: the writer died."""
    traces.written(tmp_path, {key(): torch.ones(2)})
    refused(tmp_path, "does not contain a complete trace")
    refused(tmp_path / "nowhere", "does not contain a complete trace")


FILE = {"bytes": 1, "xxh3_128": "0" * 32}
NOISE = b"\xff\xfe".decode(errors="surrogateescape")


def of_files(files):
    """A sealed ``meta.json`` that lists these files."""
    return seal_json({"format": 7, "run": "0" * 16, "files": files})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "meta.json cannot be read"),
        (NOISE, "meta.json cannot be read"),
        ("[]", "meta.json cannot be read"),
        ('"text"', "meta.json cannot be read"),
        ("[" * 99999, "meta.json cannot be read"),
        ('{"format": 7, "files": {}}', r"cannot be read \(its checksum does not match\)"),
        (seal_json({"format": 7}), r"cannot be read \(files: is missing\)"),
        (
            seal_json({"format": 7, "run": "0", "files": ["a"]}),
            "files: expected an object",
        ),
        (seal_json({"format": 7, "files": {}}), r"cannot be read \(run: is missing\)"),
        (of_files({"../a.jsonl": FILE}), r"cannot be read \(a file name with a path in it\)"),
        (of_files({"..": FILE}), r"cannot be read \(a file name with a path in it\)"),
        (
            of_files({"a.jsonl": 3}),
            r"files\['a.jsonl'\]: expected an object, got 3",
        ),
        ('{"format": 2, "files": {}}', "was written in trace format 2, this version reads 7"),
        (seal_json({"format": 99, "files": {}}), "was written in trace format 99"),
        ("{}", "was written in trace format unknown"),
    ],
)
def test_a_foreign_or_damaged_meta(tmp_path, text, says):
    """Another version's trace is named as such; noise as noise."""
    written(tmp_path, {"a": torch.randn(5)})
    (tmp_path / "meta.json").write_text(text, errors="surrogateescape")
    refused(tmp_path, says)


GOOD = {
    "key": [1, 0, "output", "b", 0],
    "shape": [5],
    "dtype": "float32",
    "file": "rank-00000.0000.safetensors",
    "tensor": "0",
}


def test_a_good_index_line(tmp_path):
    """The line that the damaged ones are made of is read."""
    index = written(tmp_path, {"a": torch.randn(5)}) / "rank-00000.index.jsonl"
    boxes = [[[0], [5], [0]]]
    index.write_text(index.read_text() + json.dumps(GOOD | {"boxes": boxes}) + "\n")
    seal(tmp_path, {})
    read_all(tmp_path)


def test_an_endless_index_line(tmp_path, monkeypatch):
    """Memory is bounded."""
    monkeypatch.setattr(codec, "LINE_LIMIT", 1000)
    index = written(tmp_path, {"a": torch.randn(5)}) / "rank-00000.index.jsonl"
    index.write_text(index.read_text() + " " * 2000)
    seal(tmp_path, {})
    refused(tmp_path, "index.jsonl:2 is damaged .longer than 1000 bytes")


@pytest.mark.parametrize(
    "line",
    [
        "{",
        NOISE,
        "[]",
        "7",
        "{}",
        '{"key": [1, 0, "output", "a"], "shape": [], "dtype": "float32"}',
        '{"key": [1, 0, "nonsense", "a", 0], "shape": [], "dtype": "float32"}',
        '{"key": [1, 0, "output", "a", 0], "shape": 3, "dtype": "float32"}',
        '{"key": [1, 0, "output", "a", 0], "shape": [], "dtype": "float32", "boxes": [[[0], [1]]]}',
        '{"key": [1, 0, "output", "a", 0], "shape": [], "dtype": "float32", "same_as": 5}',
        '{"key": [1, 0, "output", "a", 0], "shape": [], "dtype": "float32", "same_as": "b"}',
        *(GOOD | {"key": [True, 0, "output", "a", 0]}, GOOD | {"key": [-1, 0, "output", "a", 0]}),
        *(GOOD | {"key": [1, -2, "output", "a", 0]}, GOOD | {"key": [1, 0, [], "a", 0]}),
        *(GOOD | {"key": [1, 0, "output", 7, 0]}, GOOD | {"key": [1.0, 0, "output", "a", 0]}),
        *(GOOD | {"shape": [-1]}, GOOD | {"shape": [2**63]}, GOOD | {"shape": [0] * 65}),
        *(GOOD | {"dtype": "load"}, GOOD | {"dtype": 3}, GOOD | {"dtype": []}),
        *(GOOD | {"file": "../rank-00000.0000.safetensors"}, GOOD | {"file": "meta.json"}),
        *(GOOD | {"file": "rank-00000.0009.safetensors"}, GOOD | {"file": 1}),
        *(GOOD | {"factor": 0}, GOOD | {"factor": math.inf}, GOOD | {"factor": True}),
        *(GOOD | {"factor": 10**400}, GOOD | {"sums": [None]}, GOOD | {"sums": [0] * 999}),
        *(GOOD | {"boxes": [[[0], [6], [0]]]}, GOOD | {"boxes": [[[1], [5], [0]]]}),
        *(GOOD | {"boxes": [[[0], [5], [1]]]}, GOOD | {"boxes": [[[0], [-5], [0]]]}),
        *(GOOD | {"boxes": [[[0, 0], [5, 1], [0]]]}, GOOD | {"boxes": [[[0], [5], []]]}),
        GOOD | {"boxes": [[[0], [5], [0, 0]]]},
        {"key": GOOD["key"], "shape": [5], "dtype": "float32"},
        {"key": GOOD["key"], "shape": [6], "dtype": "float32", "same_as": 0},
        {"key": GOOD["key"], "shape": [5], "dtype": "int32", "same_as": 0},
        "[" * 99999,
    ],
)
def test_a_damaged_index_line(tmp_path, line):
    """The file and the line are named."""
    line = line if isinstance(line, str) else json.dumps(line)
    index = written(tmp_path, {"a": torch.randn(5)}) / "rank-00000.index.jsonl"
    index.write_text(index.read_text() + line + "\n", errors="surrogateescape")
    seal(tmp_path, {})
    refused(tmp_path, r"rank-00000.index.jsonl:2 is damaged")


def test_damaged_data_of_the_right_size(tmp_path):
    """Noise, noise that was sealed, and a file that lacks the tensor."""
    file = data_file(written(tmp_path, {"a": torch.randn(50)}))
    file.write_bytes(b"\xff" * file.stat().st_size)
    refused(tmp_path, r"safetensors is damaged \(its checksum does not match\)")
    seal(tmp_path, {})
    refused(tmp_path, r"safetensors is damaged")
    other = written(tmp_path / "other", {})
    index = other / "rank-00000.index.jsonl"
    line = index_module.encode(entry(torch.ones(1), file="none.safetensors", tensor="0"))
    index.write_text(f"{line}\n")
    seal(other, {})
    refused(other, r"index.jsonl:1 is damaged \('file' is not a file of this trace\)")


@pytest.mark.parametrize(
    ("error", "number", "words"),
    [
        (MemoryError(), None, "no memory to map it"),
        (RuntimeError("any words"), errno.ENOMEM, "no memory to map it"),
        (RuntimeError("any words"), errno.EACCES, "is damaged"),
        (RuntimeError("Cannot allocate memory"), None, "is damaged"),
    ],
)
def test_too_little_memory(tmp_path, monkeypatch, error, number, words):
    """It is not called damage, and tracing again would not help."""
    written(tmp_path, {"a": torch.randn(5)})
    monkeypatch.setattr(store, "MappedFile", Mock(side_effect=error))
    if number:
        monkeypatch.setattr(mapped.mmap, "mmap", Mock(side_effect=OSError(number, "")))
    with pytest.raises(TTraceError, match=words):
        read_all(tmp_path)


def test_data_of_another_kind_than_the_index_says(tmp_path):
    """Shape and dtype of the file are compared with the index line's."""
    for data in (torch.randn(6), torch.randn(5).double(), torch.randn(1, 5)):
        written(tmp_path, {"a": torch.randn(5)})
        save_file({"0": data}, data_file(tmp_path))
        seal(tmp_path, {})
        refused(tmp_path, "it holds another tensor than the index says")


def test_meta_keeps_what_it_is_given(tmp_path):
    """Role, fingerprint and whatever else, beside the sizes of all files."""
    written(tmp_path, {"a": torch.randn(6)}, microbatches=4)
    (tmp_path / "unrelated.txt").write_text("left alone")
    meta = read_meta(tmp_path)
    assert (meta["role"], meta["microbatches"], meta["format"]) == ("reference", 4, 7)
    assert sorted(meta["files"]) == ["rank-00000.0000.safetensors", "rank-00000.index.jsonl"]
    assert re.fullmatch("[0-9a-f]{16}", meta["run"])
