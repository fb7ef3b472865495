# SPDX-License-Identifier: Apache-2.0
"""Text to Megatron's indexed format: what is read back with Megatron's reader is what went in."""

import json
import shlex
import shutil
import sys
import sysconfig
import types
import warnings
from pathlib import Path

import numpy
import pytest

from megatron_ttrace.cli.main import build_parser
from megatron_ttrace.jobs import text_data
from megatron_ttrace.trace.errors import TTraceError


def read_back(prefix: Path) -> list[list[int]]:
    """The documents, as Megatron's own reader finds them."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    assert list(dataset.document_indices) == list(range(len(dataset) + 1))
    return [dataset[index].tolist() for index in range(len(dataset))]


def run(*argv: object) -> int:
    args = build_parser(["data"]).parse_args(["data", *map(str, argv)])
    return args.run(args)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three documents of uneven length, one of them no text, and files that must be left out."""
    source = tmp_path / "source"
    (source / "below").mkdir(parents=True)
    (source / "b.txt").write_bytes(b"second")
    (source / "a.txt").write_bytes(bytes(range(256)))
    (source / "below" / "c.txt").write_bytes(b"\xff\xfe\x00")
    (source / "empty.txt").touch()
    (source / "other.md").write_text("other")
    (source / ".hidden.txt").write_text("hidden")
    return source


def test_round_trip(folder: Path, tmp_path: Path) -> None:
    """Every byte comes back, in the order of the names, with EOD after each document."""
    prefix = tmp_path / "new" / "folder" / "corpus"
    files = text_data.find_files([folder], "*.txt")
    counts = text_data.write_corpus(text_data.read_documents(files), prefix)
    assert read_back(prefix) == [
        [*range(256), 256],
        [*b"second", 256],
        [0xFF, 0xFE, 0, 256],
    ]
    assert counts == (3, 257 + 7 + 4)


def test_order_of_sources_is_kept(folder: Path) -> None:
    """Named files stay in the order of the command line; a folder's are sorted."""
    files = text_data.find_files([folder / "other.md", folder], "*.txt")
    names = [path.relative_to(folder).as_posix() for path in files]
    assert names == ["other.md", "a.txt", "b.txt", "below/c.txt", "empty.txt"]


def test_megatron_agrees() -> None:
    """On the type of tokens for our vocabulary, and on EOD and the size for the printed flags."""
    from megatron.core.datasets.indexed_dataset import DType
    from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer

    kind = text_data.tokenise(b"").dtype.type
    assert DType.optimal_dtype(text_data.VOCAB_SIZE) == kind == numpy.uint16
    flags = text_data.training_flags(Path("x"))
    tokenizer = NullTokenizer(vocab_size=int(flags[flags.index("--vocab-size") + 1]))
    assert (tokenizer.eod, tokenizer.vocab_size) == (text_data.EOD, text_data.VOCAB_SIZE)


def test_standard_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files in the same order each time, without installed packages; the last one is cut."""
    library = tmp_path / "lib"
    (library / "site-packages").mkdir(parents=True)
    (library / "site-packages" / "a.py").write_text("not of the library")
    (library / "b.py").write_text("import c\n")
    (library / "c.py").write_text("def c(): ...\n")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(library)})
    assert text_data.standard_library(12) == [b"import c\n", b"def"]


def test_standard_library_is_there() -> None:
    """The running Python has as much source as small jobs ask for."""
    assert sum(map(len, text_data.standard_library(300_000))) == 300_000


def test_failure_leaves_what_was_there(tmp_path: Path) -> None:
    """A write that fails half-way changes neither file and leaves nothing behind."""
    prefix = tmp_path / "x"
    text_data.write_corpus([b"good"], prefix)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def failing():
        yield b"new"
        raise TTraceError("the second file cannot be read")

    with pytest.raises(TTraceError, match="second file"):
        text_data.write_corpus(failing(), prefix)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It writes both files and prints the arguments to train with, for a shell or as JSON."""
    prefix = tmp_path / "my out"
    assert run("--output", prefix, "--glob", "b.txt", "--append-eod", folder) == 0
    assert read_back(prefix) == [[*b"second", 256]]
    last = capsys.readouterr().out.splitlines()[-1]
    words = shlex.split(last.removeprefix("train with: "))
    assert words == [*text_data.training_flags(prefix), "--split", "100,0,0"]
    assert words[:2] == ["--data-path", str(prefix)]
    assert run("--output", prefix, "--json", folder / "b.txt") == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["documents"], answer["tokens"]) == (1, 6)


@pytest.mark.parametrize(
    ("documents", "fits"), [(1, False), (60, False), (500, False), (501, True)]
)
def test_parts_without_documents(documents: int, fits: bool) -> None:
    """Megatron does not return from a part of the default split that has none."""
    assert text_data.split_flags(documents) == ([] if fits else ["--split", "100,0,0"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["{tmp}/absent"], r"absent: no such file or folder"),
        (["{tmp}/source", "--glob", "*.rs"], r"no file in this folder matches '\*.rs'"),
        (["{tmp}/source/empty.txt"], "all input files are empty"),
        (["{tmp}/source", "--max-bytes", "0"], "--max-bytes: '0': give an integer from 1 to"),
        (["{tmp}/source/b.txt", "--output", "{tmp}/source/b.txt/x"], "cannot be written"),
    ],
)
def test_bad_input(folder: Path, tmp_path: Path, argv: list[str], message: str) -> None:
    """Each mistake ends in one line that names it."""
    filled = [part.format(tmp=tmp_path) for part in argv]
    with pytest.raises(TTraceError, match=message) as caught:
        run("--output", tmp_path / "out", *filled)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("out*"))


def test_file_that_vanishes(folder: Path) -> None:
    """A file removed between listing and reading is named."""
    files = text_data.find_files([folder], "*.txt")
    shutil.rmtree(folder)
    with pytest.raises(TTraceError, match=r"a.txt cannot be read .No such file"):
        list(text_data.read_documents(files))


def test_what_the_kernel_writes_is_not_waited_for():
    """A file of ``/proc`` claims to be a regular, empty one; reading it may take forever."""
    log = Path("/proc/kmsg")
    if not log.exists():
        pytest.skip("no /proc/kmsg here")
    assert list(text_data.read_documents([log])) == []


def test_nothing_but_the_answer_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what Megatron goes without, of which it warns when it is imported."""
    from megatron.core.datasets import indexed_dataset

    class Megatron(types.ModuleType):
        def __getattr__(self, name: str) -> object:
            if name == "indexed_dataset":
                warnings.warn("Apex is not installed", stacklevel=2)
                return indexed_dataset
            raise AttributeError(name)

    monkeypatch.setitem(sys.modules, "megatron.core.datasets", Megatron("megatron.core.datasets"))
    (tmp_path / "a.txt").write_text("text")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run("--output", tmp_path / "out", tmp_path / "a.txt") == 0


def test_a_second_run_does_not_read_its_own_output(folder: Path) -> None:
    """The output may be below a source."""
    documents = []
    for _ in range(2):
        assert run("--output", folder / "out", folder) == 0
        documents.append(read_back(folder / "out"))
    assert documents[0] == documents[1]
