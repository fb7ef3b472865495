# SPDX-License-Identifier: Apache-2.0
"""The public API: what is in it, what it returns, what it raises, and its document."""

import io
import json
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest
from rich.console import Console

import megatron_ttrace
from megatron_ttrace import Outcome, Report, Result, TTraceError
from megatron_ttrace.report.terminal import render
from megatron_ttrace.saved import api
from megatron_ttrace.trace import files
from tests import api_document, warm
from tests.jobs.test_job import ANSWER
from tests.programs import ROOT, environment
from tests.report.synthetic_report import embedding_bug, make_verdict

DOCUMENT = ROOT / "docs" / "api.md"


def test_every_name_is_there() -> None:
    """Each public name is importable, and no other is."""
    for name in megatron_ttrace.__all__:
        assert getattr(megatron_ttrace, name) is not None
        assert name in dir(megatron_ttrace)
    with pytest.raises(AttributeError, match="no attribute 'chek'"):
        megatron_ttrace.chek  # noqa: B018


def test_using_it_is_light() -> None:
    """A program that reads a report needs neither torch nor Megatron."""
    program = (
        "import sys, megatron_ttrace\n"
        "[getattr(megatron_ttrace, name) for name in megatron_ttrace.__all__]\n"
        "try: megatron_ttrace.load_report('nowhere')\n"
        "except megatron_ttrace.TTraceError: pass\n"
        "print({'torch', 'megatron', 'wandb'} & sys.modules.keys())"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "set()"


def test_compare_is_the_function() -> None:
    """``compare`` stays the function after the subpackage of that name was imported."""
    import megatron_ttrace.compare
    from megatron_ttrace.compare import wire

    assert megatron_ttrace.compare is api.compare
    assert wire.__name__ == "megatron_ttrace.compare.wire"


def test_everything_is_typed() -> None:
    """Parameters, results, fields and properties, in types that resolve."""
    for name in ("check", "compare", "load_report"):
        hints = typing.get_type_hints(getattr(megatron_ttrace, name), vars(api))
        assert hints["return"] is Report
    assert typing.get_type_hints(Report.is_equivalent.fget)["return"] is bool
    assert (ROOT / "megatron_ttrace" / "py.typed").is_file()


def test_a_report() -> None:
    """Its properties agree with its records."""
    failed = make_verdict(verdict=Outcome.DIVERGED, rel_err=0.5)
    summary, _ = embedding_bug()
    report = Report(summary=summary, verdicts=(make_verdict(), failed), directory=Path("out"))
    assert report.verdict is Result.DIVERGED
    assert not report.is_equivalent
    assert report.culprits == summary.culprits
    assert report.failures() == [failed]
    assert report.run is summary.run


def test_load_report(tmp_path: Path) -> None:
    """A written report is read back; a damaged one is refused."""
    summary, verdicts = embedding_bug()
    files.write_records(tmp_path / files.VERDICTS, verdicts)
    files.write_summary(tmp_path / files.SUMMARY, summary)
    report = megatron_ttrace.load_report(str(tmp_path))
    assert (report.verdict, report.verdicts) == (Result.DIVERGED, tuple(verdicts))
    assert report.directory == tmp_path
    with (tmp_path / files.VERDICTS).open("a") as file:
        file.write("{}\n")
    with pytest.raises(TTraceError, match="run the check again"):
        megatron_ttrace.load_report(tmp_path)


def check(folder: Path, code: str, *arguments: str, **others: typing.Any) -> Report:
    """Check a script that stands for a training job and answers at once."""
    script = folder / "train.py"
    script.write_text(ANSWER + code)
    return megatron_ttrace.check(script, arguments, directory=folder / "out", **others)


def test_check_returns_what_was_written(tmp_path: Path) -> None:
    """A divergence is a report, not an exception; environment, progress, command are passed on."""
    said: list[str] = []
    code = (
        "import json\nfrom megatron_ttrace.jobs import provenance\n"
        "pathlib.Path(directory, 'told').write_text(os.environ[provenance.COMMAND])\n"
        "assert os.environ['HERE'] == 'set'\nassert '--ttrace-seeds=2' in words\n"
        "answer(Result.DIVERGED)\nsys.exit(1)\n"
    )
    report = check(
        *(tmp_path, code, "--lr", "1", "--ttrace-seeds", "2"),
        environment={"HERE": "set"},
        progress=said.append,
    )
    assert report.verdict is Result.DIVERGED
    assert report.directory == tmp_path / "out"
    assert report.isolating[:2] == ("ttrace", "check")
    assert "measuring" in said
    words = json.loads((tmp_path / "out" / "told").read_text())
    assert words[:2] == ["ttrace", "check"]
    assert words[-4:] == ["--lr", "1", "--ttrace-seeds", "2"]


BLIND = f"""
import dataclasses
sys.path.insert(0, {str(ROOT)!r})
"""
BLIND += """
from megatron_ttrace.trace.outcomes import Reason
from megatron_ttrace.trace.records import Outcome
from tests.report.synthetic_report import embedding_bug

alone = "--ttrace-isolate" in words
if os.environ["RANK"] == "0":
    outcome, reason = (Outcome.PASS, None) if alone else (Outcome.UNCHECKED, Reason.BLIND)
    wrong = next(one for one in embedding_bug()[1] if one.verdict.is_failure)
    judged = dataclasses.replace(wrong, verdict=outcome, reason=reason)
    files.write_records(directory / files.VERDICTS, [judged], None)
    result = Result.EQUIVALENT if alone else Result.COULD_NOT_CHECK
    config = {"isolate": alone, "dtype": "bf16"}
    summary = Summary(result, {outcome.value: 1}, (), config, {}, {}, too_blind=not alone)
    files.write_summary(directory / files.SUMMARY, summary, None)
sys.exit(0 if alone else 2)
"""


def test_what_rounding_hides_is_checked_once_more(tmp_path: Path) -> None:
    """In the same directory, with modules isolated; not if the reference is given."""
    report = check(tmp_path, BLIND)
    assert (report.is_equivalent, report.directory) == (True, tmp_path / "out")
    assert report.summary.config["isolate"]
    given = check(tmp_path, BLIND, f"--ttrace-reference={tmp_path}")
    assert given.verdict is Result.COULD_NOT_CHECK


DOUBT = f"""
sys.path.insert(0, {str(ROOT)!r})
"""
DOUBT += """
from tests.report.synthetic_report import culprit_of, embedding_bug
wrong = next(one for one in embedding_bug()[1] if one.verdict.is_failure)

def conclude(culprits, **config):
    if os.environ["RANK"] == "0":
        files.write_records(directory / files.VERDICTS, [], None)
        summary = Summary(Result.DIVERGED, {}, culprits, config, {}, {})
        files.write_summary(directory / files.SUMMARY, summary, None)
    sys.exit(1)

if "--ttrace-isolate" in words:
    reference = [one for one in words if one.startswith("--ttrace-reference=")]
    assert reference == [f"--ttrace-reference={str(directory).removesuffix('-isolated')}/reference"]
    conclude((culprit_of(wrong, "", ""),), isolate=True)
(directory / "reference").mkdir(exist_ok=True)
"""


def test_doubt_is_followed_up(tmp_path: Path) -> None:
    """No cause is known of a culprit: the job is checked again at once, with modules isolated."""
    report = check(tmp_path, f"{DOUBT}\nconclude((culprit_of(wrong, '', ''),))\n")
    assert report.isolated is not None
    assert report.isolated.directory == tmp_path / "out-isolated"
    assert report.isolated.summary.config == {"isolate": True}
    assert (report.isolated.isolated, report.isolated.isolating) == (None, ())
    page = io.StringIO()
    alone = report.isolated.summary, report.isolated.directory
    console = Console(file=page, width=100)
    render(report.summary, report.verdicts, console, report.directory, report.isolating, alone)
    said = " ".join(page.getvalue().split())
    assert "embedding.word_embeddings (output) fails on its own; cause: unknown" in said
    assert "--ttrace-isolate" not in said


def test_no_doubt_is_not_followed_up(tmp_path: Path) -> None:
    """With a cause, or where another check fails, the answer stands alone."""
    known = "culprit_of(wrong, '', '', cause=next(iter(Cause)))"
    code = f"{DOUBT}\nfrom megatron_ttrace.trace.findings import Cause\nconclude(({known},))\n"
    assert check(tmp_path, code).isolated is None
    code = DOUBT.replace("    reference = ", "    sys.exit(3)\n    reference = ")
    assert check(tmp_path, f"{code}\nconclude((culprit_of(wrong, '', ''),))\n").isolated is None


def test_an_undecided_check_is_a_report(tmp_path: Path) -> None:
    """With the reason in its notices; the command would end with exit code 2."""
    code = "answer(Result.COULD_NOT_CHECK)\nsys.exit(2)\n"
    assert check(tmp_path, code).verdict is Result.COULD_NOT_CHECK


@pytest.mark.parametrize(
    "code",
    [
        "sys.exit(2)",
        "answer(Result.EQUIVALENT)\nsys.exit(2)",
        "answer(Result.COULD_NOT_CHECK, 'f' * 16)\nsys.exit(2)",
        "answer(Result.COULD_NOT_CHECK)\n(directory / files.VERDICTS).write_text('{}')\n"
        "sys.exit(2)",
    ],
)
def test_a_check_without_a_report_raises(tmp_path: Path, code: str) -> None:
    """No report was written, or one that is not valid."""
    with pytest.raises(TTraceError):
        check(tmp_path, code)


@pytest.mark.parametrize(
    ("arguments", "others", "says"),
    [
        ((), {"nproc_per_node": 0}, "give 1 to .* ranks"),
        ((), {"timeout": 0}, "give seconds above 0"),
        ((), {"timeout": float("nan")}, "give seconds above 0"),
        ((), {"allow_unchecked": 2}, "give a share from 0 to 1"),
        (("--ttrace-iterations", "x"), {}, "give numbers or ranges"),
        (("--ttrace-seeds", "many"), {}, "argument --ttrace-seeds: .*give an integer"),
    ],
)
def test_bad_input_to_check(tmp_path: Path, arguments, others, says: str) -> None:
    """One line, before anything is started or written."""
    with pytest.raises(TTraceError, match=says):
        check(tmp_path, "raise AssertionError", *arguments, **others)
    assert not (tmp_path / "out").exists()


def test_other_bad_input(tmp_path: Path) -> None:
    """A missing script or trace, an impossible share."""
    with pytest.raises(TTraceError, match="no such script"):
        megatron_ttrace.check(tmp_path / "absent.py", directory=tmp_path / "out")
    with pytest.raises(TTraceError, match="absent"):
        megatron_ttrace.compare(tmp_path / "absent", tmp_path)
    with pytest.raises(TTraceError, match="give a share from 0 to 1"):
        megatron_ttrace.compare(tmp_path, tmp_path, allow_unchecked=-1)


def test_the_document_is_complete() -> None:
    """Every public name is in it, once."""
    names = {*api_document.DESCRIBED, *api_document.RECORDS, "__version__"}
    assert names == set(megatron_ttrace.__all__)


def test_the_reference_of_the_site() -> None:
    """It takes the place of the mark, and has signatures, parameters and members."""
    text = api_document.on_page_markdown(DOCUMENT.read_text(encoding="utf-8"))
    assert api_document.MARK not in text
    assert "def check(\n    script: PathLike," in text
    assert "\n- `script`: a Megatron training script" in text
    assert "\n- `.failures()`: " in text
    assert api_document.on_page_markdown("# Another page\n") == "# Another page\n"


@pytest.mark.slow
def test_the_example_of_the_document(tmp_path: Path) -> None:
    """Its blocks run one after the other, as one program."""
    by_hand = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    assert len(by_hand) == 3
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    (tmp_path / "example.py").write_text("\n".join(by_hand))
    done = warm.run(["example.py"], cwd=tmp_path, env=environment(), timeout=840)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    first, *_, last = done.stdout.splitlines()
    assert first.startswith("equivalent {'pass': ")
    assert "embedding.word_embeddings" in done.stdout
    assert "nowhere" in last
    written = json.loads((tmp_path / "faulty" / files.SUMMARY).read_text())
    assert written["run"]["command"][:2] == ["ttrace", "check"]
