# SPDX-License-Identifier: Apache-2.0
"""Sealed JSON: what was sealed comes back, anything else does not."""

import json
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.trace import sealing
from megatron_ttrace.trace.codec import CodecError

documents = st.dictionaries(
    st.text(max_size=9).filter(lambda key: key != sealing.CHECKSUM),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=9,
    ),
    min_size=1,
    max_size=5,
)


@given(documents, st.sampled_from([1, 2]))
def test_round_trip(document: dict[str, object], indent: int) -> None:
    """Any JSON object, with its checksum as the first key."""
    data = sealing.seal_json(document, indent=indent).encode()
    opened = sealing.open_sealed(data)
    assert next(iter(opened)) == sealing.CHECKSUM
    assert opened.pop(sealing.CHECKSUM) == xxhash.xxh3_128_hexdigest(data.split(b"\n", 1)[1])
    assert opened == document
    assert sealing.seal_json(sealing.open_sealed(data), indent=indent).encode() == data


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:-1],
        lambda text: text + " ",
        lambda text: text.replace(" ", "  "),
        lambda text: json.dumps(json.loads(text)),
        lambda text: text[:14] + text[14:46].upper() + text[46:],
        lambda text: "",
    ],
)
def test_other_bytes_of_the_same_values(change: object) -> None:
    """Bytes count, not what they mean."""
    assert callable(change)
    text = sealing.seal_json({"a": [1, 2], "b": "c"})
    assert sealing.is_sealed(text.encode())
    assert text[14:46].upper() != text[14:46]
    assert not sealing.is_sealed(change(text).encode())
    with pytest.raises(CodecError):
        sealing.open_sealed(change(text).encode())


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes and checksums in the given order, by one thread or several."""
    contents = [b"", b"a", bytes(1000), b"b" * 100, b"c" * 201]
    paths = [tmp_path / str(number) for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    wanted = [(len(content), sealing.checksum_of(content)) for content in contents]
    assert sealing.checksums_of_files(paths) == wanted
    monkeypatch.setattr(sealing, "_WORTH_THREADS", 0)
    monkeypatch.setattr(sealing.os, "cpu_count", lambda: 4)
    assert sealing.checksums_of_files(paths) == wanted
    with pytest.raises(FileNotFoundError):
        sealing.checksums_of_files([tmp_path / "none"])
