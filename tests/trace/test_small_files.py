# SPDX-License-Identifier: Apache-2.0
"""Files of users end in a value or one error, in bounded time and memory, whatever they are."""

import os
import time

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.trace import small_files
from megatron_ttrace.trace.codec import CodecError

READERS = (small_files.text, small_files.toml, small_files.yaml)
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)
)
HOSTILE = {
    "aliases": BOMB,
    "itself": "&a [*a, *a]\n",
    "deep flow": "[" * 100_000,
    "deep blocks": "".join(" " * n + "a:\n" for n in range(600)),
    "deep table": "x = " + "[" * 50_000,
    "deep inline": "x = " + "{a = " * 20_000,
    "keys": "? [a, b]\n: c\n",
    "long integer": "x = " + "9" * 5000,
    "tag": "!!python/object/apply:os.system ['true']\n",
    "escape": "a: \x1b[2J\n",
    "two documents": "a: 1\n---\nb: 2\n",
}


def values(reader, path):
    """What a reader makes of a file, or its one error."""
    try:
        return reader(path)
    except (OSError, CodecError) as error:
        return error


@pytest.mark.parametrize("text", HOSTILE.values(), ids=list(HOSTILE))
def test_hostile_text(tmp_path, text):
    """No bomb goes off."""
    path = tmp_path / "file"
    path.write_text(text)
    began = time.process_time()
    for reader in READERS:
        values(reader, path)
    assert time.process_time() - began < 20


@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_small_file(tmp_path, reader):
    """A pipe, a device without an end, a folder, a large file, and nothing."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    (tmp_path / "large").write_bytes(b"a" * (small_files.LIMIT + 1))
    for name in ("pipe", "link", "large"):
        with pytest.raises(CodecError):
            reader(tmp_path / name)
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises((OSError, CodecError)):
            reader(path)


def test_aliases_in_moderation(tmp_path):
    """Megatron-LM's own configurations have some; not billions."""
    path = tmp_path / "file"
    path.write_text(BOMB)
    assert isinstance(values(small_files.yaml, path), CodecError)
    path.write_text("a: &a {x: 1e-5}\nb: {<<: *a}\nc: [*a, *a]\n")
    plain = {"x": "1e-5"}
    assert small_files.yaml(path) == {"a": plain, "b": {"<<": plain}, "c": [plain, plain]}


@given(content=st.one_of(st.binary(max_size=300), st.text("[]{}&*a:-?!|>'\" \n#=.1", max_size=80)))
def test_any_content(tmp_path_factory, content):
    """A value or an error."""
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    for reader in READERS:
        values(reader, path)


@given(st.recursive(st.text("abc", min_size=1), lambda inner: st.lists(inner, min_size=1)))
def test_yaml_comes_back(tmp_path_factory, value):
    """As text."""
    path = tmp_path_factory.getbasetemp() / "yaml"
    path.write_text(yaml.safe_dump(value))
    read = values(small_files.yaml, path)
    assert read == value or "deep" in str(read)
