# SPDX-License-Identifier: Apache-2.0
"""The codec of all records: nothing is converted, and errors name the field."""

import dataclasses
import json
import os
from enum import StrEnum
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.trace import codec
from megatron_ttrace.trace.codec import Bounds, CodecError, Count, Size
from tests.placement.meshes import mesh_of
from tests.trace.arbitrary import arbitrary


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass(frozen=True, slots=True)
class Inner:
    at: int
    name: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    at: int
    size: Size
    count: Count
    colour: Colour
    maybe: Inner | None = None
    many: tuple[Inner, ...] = ()
    pair: tuple[int, str] = (0, "")
    table: dict[str, float] = dataclasses.field(default_factory=dict)
    free: Any = None
    flag: bool = False
    written: Annotated[float, Bounds(0.0, nan=True, text=True)] = 0.0

    def contradiction(self) -> str:
        return "flag: a red one has none" if self.flag and self.colour is Colour.RED else ""


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
GOOD = {"at": 1, "size": 1.5, "count": 2, "colour": "red"}


@given(arbitrary(Record))
def test_round_trip(record):
    """Through strict JSON."""
    text = json.dumps(codec.encode(record), allow_nan=False)
    assert codec.decode(Record, codec.parse(text)) == record


@given(json_values)
def test_anything_else_is_refused(value):
    """With its own error, and nothing but that."""
    with pytest.raises(CodecError):
        codec.decode(Record, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"at": "x"}, "at: expected an integer from .*, got 'x'"),
        ({"at": True}, "at: expected .*, got true"),
        ({"at": 1.0}, "at: expected"),
        ({"at": 10**30}, "at: expected .*, got an integer of 100 bits"),
        ({"size": "1.5"}, "size: expected a number of at least 0, got '1.5'"),
        ({"size": "nan"}, "size: expected"),
        ({"size": -1}, "size: expected"),
        ({"count": -1}, "count: expected"),
        ({"colour": "green"}, "colour: expected one of red, blue, got 'green'"),
        ({"colour": []}, "colour: expected"),
        ({"maybe": 3}, "maybe: expected an object, got 3"),
        ({"many": [{"at": 1}, {"at": None}]}, r"many\[1\].at: expected .*, got null"),
        ({"many": "ab"}, "many: expected a list"),
        ({"pair": [1]}, "pair: expected a list of 2, got a list of 1"),
        ({"table": {"\x1b": "x"}}, r"table\['\\x1b'\]: expected a number, got 'x'"),
        ({"flag": 1}, "flag: expected true or false"),
        ({"flag": True}, "flag: a red one has none"),
        ({"written": "1_0"}, "written: expected"),
        ({"written": "9" * 5000}, "written: expected"),
    ],
)
def test_the_field_is_named(change, message):
    """By its path, with what was there, printable."""
    with pytest.raises(CodecError, match=message) as caught:
        codec.decode(Record, {**GOOD, **change})
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300


def test_more_than_the_record_says_is_left_out():
    """A checksum, or what a later version adds."""
    assert codec.decode(Record, {**GOOD, "more": 1}) == codec.decode(Record, GOOD)


def test_a_missing_field_is_named():
    """Unless it has a default."""
    assert codec.decode(Record, GOOD).pair == (0, "")
    with pytest.raises(CodecError, match="count: is missing"):
        codec.decode(Record, {name: GOOD[name] for name in GOOD if name != "count"})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"a": 1, "a": 2}',
        "NaN",
        "-Infinity",
        "1e400",
        "1" * 5000,
        str(1 << 64),
        "[" * 100_000,
        b"\xff",
    ],
)
def test_what_is_not_strict_json(text):
    """One error for all of it."""
    with pytest.raises(CodecError):
        codec.parse(text)


def test_nesting_of_free_values_is_bounded():
    """Whoever walks through them later does so with a stack."""
    value: Any = 0
    for _ in range(codec.DEPTH_LIMIT + 2):
        value = [value]
    with pytest.raises(CodecError, match="free: nested too deeply"):
        codec.decode(Record, {**GOOD, "free": value})


def test_lines_are_bounded_and_whole(tmp_path, monkeypatch):
    """Neither a cut off line nor one without end is read."""
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"1\n[2]\n")
    assert list(codec.lines(path)) == [1, [2]]
    path.write_bytes(b"1\n[2]")
    with pytest.raises(CodecError, match="truncated"):
        list(codec.lines(path))
    monkeypatch.setattr(codec, "LINE_LIMIT", 10)
    path.write_bytes(b'"' + b"x" * 20 + b'"\n')
    with pytest.raises(CodecError, match="longer than 10 bytes"):
        list(codec.lines(path))


def test_only_regular_files_are_read(tmp_path):
    """A pipe would be waited for."""
    os.mkfifo(tmp_path / "pipe")
    for read in (codec.read, lambda path: list(codec.lines(path))):
        with pytest.raises(CodecError, match="not a regular file"):
            read(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"1234")
    assert codec.read(tmp_path / "file") == b"1234"
    with pytest.raises(CodecError, match="more than the 3"):
        codec.read(tmp_path / "file", 3)


def test_a_named_tuple_is_a_list_in_the_order_of_its_fields():
    """As the axes of a mesh are."""
    mesh = mesh_of(1, 4, tp=2)
    assert codec.decode(Mesh, codec.encode(mesh)) == mesh
    assert codec.encode(mesh)["sizes"] == list(mesh.sizes)
    with pytest.raises(CodecError, match="sizes"):
        codec.decode(Mesh, {**codec.encode(mesh), "sizes": [2, 1]})


def test_a_field_that_no_record_can_hold():
    """A mistake in a record is noticed when its decoder is made."""
    for wanted in (int | str, list[int], object):
        with pytest.raises(TypeError):
            codec.decoder(wanted)
