# SPDX-License-Identifier: Apache-2.0
"""``ttrace check`` without an answer: the report all the same, with the right reason."""

import json
from pathlib import Path

import pytest

from megatron_ttrace.cli import check
from megatron_ttrace.cli.main import main

UNDECIDED = """
import pathlib, sys
from megatron_ttrace.jobs import argv
from megatron_ttrace.trace import files
from megatron_ttrace.trace.records import Result, Summary

words = argv.words()
directory = pathlib.Path(words[words.index("--ttrace-dir") + 1])
print("ttrace: building the model", flush=True)
files.write_records(directory / files.VERDICTS, [])
summary = Summary(Result.COULD_NOT_CHECK, {}, (), {}, {}, {}, notices=("9 of 10 unchecked",))
files.write_summary(directory / files.SUMMARY, summary)
sys.exit(2)
"""


@pytest.mark.parametrize("words", [("check",), ("check", "--json"), ("record",)])
def test_too_many_unchecked_tensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    """The report with its notice; the last line of progress is no reason."""
    script = tmp_path / "train.py"
    script.write_text(UNDECIDED)
    more = ["--no-fork", "--ttrace-dir", str(tmp_path / "out"), "--", str(script)]
    code = main([*words, *more])
    out, errors = capsys.readouterr()
    assert not [line for line in errors.splitlines() if line.startswith("ttrace: ")]
    if words == ("record",):
        assert (code, "could not check" in out) == (0, True)
    elif words == ("check",):
        assert (code, "9 of 10 unchecked" in out) == (2, True)
    else:
        assert (code, json.loads(out)["verdict"]) == (2, "could not check")


def test_a_directory_that_looks_like_a_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reaches the ranks' parser, and Megatron's, as a directory."""
    parsing = (
        "import argparse, pathlib, sys\nfrom megatron_ttrace.jobs import argv\n"
        "parser = argparse.ArgumentParser(allow_abbrev=False)\n"
        "parser.add_argument('--ttrace-dir')\n"
        "directory = pathlib.Path(parser.parse_known_args(argv.words())[0].ttrace_dir)\n"
    )
    words = 'pathlib.Path(words[words.index("--ttrace-dir") + 1])'
    (tmp_path / "train.py").write_text(f"{parsing}{UNDECIDED.replace(words, 'directory')}")
    monkeypatch.chdir(tmp_path)
    assert main(["check", "--no-fork", "--json", "--ttrace-dir=-x", "--", "train.py"]) == 2
    assert json.loads(capsys.readouterr().out)["verdict"] == "could not check"
    assert (tmp_path / "-x" / "summary.json").is_file()


CONFIGURED = """
import json, os, sys
from megatron_ttrace.jobs import argv
from megatron_ttrace.jobs.settings import split
from megatron_ttrace.trace import files, owned
from megatron_ttrace.trace.records import Result, Summary

if False:
    import megatron.bridge
settings, theirs = split([*argv.ours(), *argv.theirs()])
if settings.role == "plan":
    if theirs == ["trains"]:
        flags = "--tensor-model-parallel-size 8 --num-layers 32 --hidden-size 4096"
        owned.write(settings.overrides, [json.dumps(flags.split())])
    sys.exit(0)
if os.environ["RANK"] == "0":
    notices = (os.environ["WORLD_SIZE"], *theirs, settings.small.read_text())
    files.write_records(settings.directory / files.VERDICTS, [])
    summary = Summary(Result.COULD_NOT_CHECK, {}, (), {}, {}, {}, notices=notices)
    files.write_summary(settings.directory / files.SUMMARY, summary)
sys.exit(2)
"""
"""Does with our flags what a rank of Megatron-Bridge does."""


def test_a_configuration_is_shrunk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank says what it is; small jobs run the same command with flags to shrink it to."""
    script = tmp_path / "train.py"
    script.write_text(CONFIGURED)
    monkeypatch.chdir(tmp_path)
    large = ("torchrun", "--nproc-per-node", "8", "--nnodes", "4", str(script))
    how = ["check", "--no-fork", "--json", "--shrink", "--", *large]
    assert main([*how, "trains"]) == 2
    both, one = json.loads(capsys.readouterr().out)
    ranks, word, flags = both["notices"]
    assert (ranks, word) == ("4", "trains")
    assert "--tensor-model-parallel-size 2 --num-layers 2 --hidden-size 64" in flags
    folder = tmp_path / "ttrace-out-data" / "shrunk-text-chats"
    assert f"--data {folder}" in flags
    assert (folder / "prompt" / "training.jsonl").is_file()
    assert (one["notices"][0], len(one["notices"])) == ("2", 3)
    bare = ["--nproc-per-node", "8", "--", str(script), "trains"]
    assert main([*how[: how.index("--")], *bare]) == 2
    assert json.loads(capsys.readouterr().out)["notices"][0] == "2"
    assert main([*how, "ends"]) == 2
    assert "train.py ended before pretrain()" in capsys.readouterr().err


def test_jobs_with_one_reason() -> None:
    """What ends several small jobs is reported once, with the log of the first."""
    folder = Path("out")
    why = [
        (n, f"rank 0 failed: {'A' if n < 4 else 'B'} (log: out/{n}/rank.log)") for n in (1, 3, 4)
    ]
    assert check._refusals(why, 4, folder) == [
        "jobs 1 and 3 of 4: rank 0 failed: A (log: out/1/rank.log)",
        "job 4 of 4: rank 0 failed: B (log: out/4/rank.log)",
    ]
    assert check._refusals([(1, "why")], 1, folder) == ["why"]
    assert check._refusals([(1, "a"), (2, "a"), (3, "a")], 4, folder) == ["jobs 1, 2 and 3 of 4: a"]
    assert check._refusals([(1, "a"), (2, "a")], 2, folder) == ["all 2 jobs: a"]
