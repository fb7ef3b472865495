# SPDX-License-Identifier: Apache-2.0
"""``ttrace bugs run``, whole, on small jobs."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ttrace.jobs.resources import patches_dir
from tests import warm
from tests.integration.jobs import environment

ROOT = Path(__file__).parents[3]
BUG = patches_dir() / "bugs" / "01-tp-embedding-mask.toml"
NO_CATALOGUE = ""


def ttrace(folder: Path | str, *words: str, timeout: float = 280) -> tuple[int, str, str]:
    """Run the command in a process of its own: the suite switches the CPU backend on."""
    driver = [str(ROOT / "tests" / "evaluation" / "bugs" / "driver.py"), str(folder)]
    start = driver if folder else ["-m", "megatron_ttrace"]
    done = warm.run([*start, *words], cwd=ROOT, env=environment(), timeout=timeout)
    return done.returncode, done.stdout, done.stderr


def rows(output: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(output)
    return found


def verdicts(directory: Path) -> list[str]:
    """The lines, without the id of their run."""
    lines = map(json.loads, (directory / "verdicts.jsonl").read_text().splitlines())
    return [json.dumps({name: line[name] for name in line if name != "run"}) for line in lines]


def one_layout(folder: Path, name: str, *, harmless: bool = False) -> None:
    """Bug 01 in its first layout only, under another name; on demand with a patch of no effect."""
    text = BUG.read_text()
    first, *_, last = text.split("[[layout]]\n")
    only = text.split("[[layout]]\n")[1]
    rest = last.split("[[patch]]", 1)[1]
    text = f"{first}[[layout]]\n{only}[[patch]]{rest}"
    if harmless:
        begin = text.index("            # The ids are shifted already")
        end = text.index("            output_parallel[input_mask", begin)
        text = text[:begin] + "            pass\n" + text[end:]
    (folder / name).write_text(text)


def test_list() -> None:
    """As JSON and as a table."""
    code, output, _ = ttrace(NO_CATALOGUE, "bugs", "list", "--json")
    assert code == 0
    assert [bug["id"] for bug in rows(output)][:2] == ["01", "02"]
    code, output, _ = ttrace(NO_CATALOGUE, "bugs", "list")
    assert code == 0
    assert "tp-embedding" in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name the bugs"),
        (["--all", "01"], "name the bugs"),
        (["99"], "99: unknown, known are 01"),
    ],
)
def test_wrong_use(words: list[str], message: str) -> None:
    """One line, exit code 2."""
    code, _, errors = ttrace(NO_CATALOGUE, "bugs", "run", *words)
    assert code == 2
    assert message in errors
    assert "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision", [[], pytest.param(["--bf16"], marks=pytest.mark.nightly)], ids=["fp32", "bf16"]
)
def test_first_bug_in_three_layouts(work: Path, precision: list[str]) -> None:
    """TP 2, with sequence parallelism, with PP 2: found at the embedding, and nowhere else."""
    code, output, errors = ttrace(
        NO_CATALOGUE, "bugs", "run", "01", "--json", "--directory", str(work), *precision
    )
    found = rows(output)
    assert code == 0, (found, errors)
    assert [row["nproc"] for row in found] == [2, 2, 4]
    for row in found:
        assert row["healthy"]
        assert row["detected"]
        assert {(c["name"], c["kind"], c["direction"]) for c in row["culprits"]} == {
            ("embedding.word_embeddings", "output", "forward")
        }
        assert float(row["margin"]) > 10


@pytest.mark.slow
def test_nothing_hangs_on_the_id(tmp_path: Path, work: Path) -> None:
    """Under another number the same bug gives the same verdicts, line for line."""
    catalogue = tmp_path / "bugs"
    catalogue.mkdir()
    one_layout(catalogue, "33-something-else.toml")
    one_layout(catalogue, "44-yet-another.toml")
    code, output, errors = ttrace(
        catalogue, "bugs", "run", "--all", "--json", "--directory", str(work)
    )
    assert code == 0, (output, errors)
    first, second = (verdicts(work / f"{bug}-0-faulty") for bug in ("33", "44"))
    assert first == second
    assert any('"diverged"' in line or '"replica_conflict"' in line for line in first)


@pytest.mark.slow
def test_no_bug_no_culprit(tmp_path: Path, work: Path) -> None:
    """With a patch that changes nothing the same case must be found equivalent: exit code 2."""
    catalogue = tmp_path / "bugs"
    catalogue.mkdir()
    one_layout(catalogue, "01-tp-embedding-mask.toml", harmless=True)
    code, output, errors = ttrace(
        catalogue, "bugs", "run", "01", "--json", "--directory", str(work)
    )
    assert code == 2, errors
    (row,) = rows(output)
    assert (row["healthy"], row["detected"], row["met"]) == (True, False, False)
    assert row["problem"] == "found equivalent"


@pytest.mark.slow
def test_a_case_that_cannot_run(tmp_path: Path, work: Path) -> None:
    """A fragment that this Megatron lacks: one line, exit code 2."""
    catalogue = tmp_path / "bugs"
    catalogue.mkdir()
    path = catalogue / "01-tp-embedding-mask.toml"
    one_layout(catalogue, path.name)
    path.write_text(path.read_text().replace("# Mask the output embedding.", "# Not there.", 1))
    code, output, _ = ttrace(catalogue, "bugs", "run", "01", "--json", "--directory", str(work))
    assert code == 2
    (row,) = rows(output)
    assert row["healthy"]
    assert "occurs 0 times instead of once" in row["problem"]
    assert "of megatron-core 0." in row["problem"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "variant",
    [
        f"--model {model} --seed {seed} {more}"
        for model in ("gpt", "llama")
        for seed in (1234, 7)
        for more in ("", "--bf16", "--size medium")
    ],
)
def test_all_bugs(tmp_path: Path, variant: str) -> None:
    """Another model, size, precision and seed: the same verdicts, places and explanations."""
    words = ("bugs", "run", "--all", "--json", "--directory", str(tmp_path), *variant.split())
    code, output, errors = ttrace(NO_CATALOGUE, *words, timeout=1800)
    bad = [(row["id"], row["problem"]) for row in rows(output) if not row["met"]]
    assert code == 0, (bad, errors[-2000:])


@pytest.mark.nightly
def test_isolated(tmp_path: Path) -> None:
    """With every input taken from the reference, only the culprit's module is red: 12 of 14."""
    words = ("bugs", "run", "--all", "--isolate", "--json", "--directory", str(tmp_path))
    _, output, errors = ttrace(NO_CATALOGUE, *words, timeout=1800)
    found = rows(output)
    strays = {row["id"][:2] for row in found if not row["localised"]}
    assert len({row["id"][:2] for row in found}) == 14
    assert len(strays) <= 2, ([(row["id"], row["problem"]) for row in found], errors[-2000:])
    assert all(row["healthy"] for row in found)
