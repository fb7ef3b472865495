# SPDX-License-Identifier: Apache-2.0
"""``ttrace bugs run``, whole, on small jobs; and that nothing cheats.

Without the faults, or with another bug's expectations, the suite must fail.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_ttrace.cli.main import main
from megatron_ttrace.jobs.resources import patches_dir
from tests.integration.jobs import ROOT, python

BUGS = patches_dir() / "bugs"
ALL = sorted(path.name for path in BUGS.glob("*.toml"))
ONE, TWO = ALL[:1], ("01-tp-embedding-mask.toml", "11-sp-layernorm.toml")
_PATCH = re.compile(r'(fragment = """(.*?)"""\n)replacement = """.*?"""', re.DOTALL)


def ttrace(folder: Path | None, *words: str, timeout: float = 840) -> tuple[int, str, str]:
    """Run the command in a process of its own: the suite switches the CPU backend on."""
    driver = [str(ROOT / "tests" / "evaluation" / "bugs" / "driver.py"), str(folder)]
    start = driver if folder else ["-m", "megatron_ttrace"]
    done = python(*start, *words, cwd=ROOT, timeout=timeout)
    return done.returncode, done.stdout, done.stderr


def rows(output: str) -> list[dict[str, Any]]:
    parsed: list[dict[str, Any]] = json.loads(output)
    return parsed


def verdicts(directory: Path) -> list[str]:
    """The lines, without the id of their run."""
    lines = map(json.loads, (directory / "verdicts.jsonl").read_text().splitlines())
    return [json.dumps({name: line[name] for name in line if name != "run"}) for line in lines]


def described(names: Sequence[str], layouts: int = 99) -> list[str]:
    """The descriptions, with the first layouts only."""
    texts = []
    for name in names:
        head, *parts = (BUGS / name).read_text().split("[[layout]]\n")
        parts[-1], patches = parts[-1].split("[[patch]]", 1)
        texts.append("[[layout]]\n".join([head, *parts[:layouts]]) + f"[[patch]]{patches}")
    return texts


def harmless(texts: Sequence[str]) -> list[str]:
    """Every fragment replaced by itself."""
    changed = [_PATCH.sub(r'\1replacement = """\2"""', text) for text in texts]
    assert all(len(_PATCH.findall(text)) == text.count("[[patch]]") for text in texts)
    return changed


def scrambled(texts: Sequence[str]) -> list[str]:
    """Each bug with the next one's expectation, as if their ids had been mixed up."""
    parts = [text.split("[expected]") for text in texts]
    expected = [part[1] for part in (*parts[1:], parts[0])]
    return [f"{part[0]}[expected]{text}" for part, text in zip(parts, expected, strict=True)]


def run(
    directory: Path, names: Sequence[str], texts: Sequence[str], code: int = 2, timeout: float = 840
) -> list[dict[str, Any]]:
    """The rows of a suite with this catalogue; it ends with 2: no run without a bug diverged."""
    catalogue = directory / "catalogue"
    catalogue.mkdir()
    for name, text in zip(names, texts, strict=True):
        (catalogue / name).write_text(text)
    words = ("bugs", "run", "--all", "--json", "--directory", str(directory))
    ended, output, errors = ttrace(catalogue, *words, timeout=timeout)
    assert ended == code, (output, errors[-3000:])
    return rows(output)


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    """As JSON, and as text of 80 columns."""
    assert main(["bugs", "list", "--json"]) == 0
    assert [bug["id"] for bug in rows(capsys.readouterr().out)][:2] == ["01", "02"]
    assert main(["bugs", "list"]) == 0
    output = capsys.readouterr().out
    assert "tp-embedding" in output
    assert max(map(len, output.splitlines())) <= 80


CHANGED = {
    "31-in-two-layouts": described(ONE, 2)[0],
    "33-absent": described(ONE, 1)[0].replace("# Mask the output embedding.", "# Not there.", 1),
    "34-harmless": harmless(described(ONE, 1))[0],
    "35-expects-another": scrambled(described(TWO, 1))[0],
    "36-another-bug": described(TWO[1:], 1)[0],
}
"""Two bugs, as they are and changed, under other numbers; some share the runs without a bug."""


Suite = tuple[Path, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    """The directory of a suite of them, and its rows."""
    folder = tmp_path_factory.mktemp("suite")
    found = run(folder, [f"{name}.toml" for name in CHANGED], list(CHANGED.values()))
    assert [row["id"] for row in found] == [*["31"] * 2, "33", "34", "35", "36"]
    assert all(row["healthy"] for row in found)
    return folder, found


@pytest.mark.slow
def test_two_bugs(suite: Suite) -> None:
    """TP 2, without and with sequence parallelism: found at their modules, and nowhere else."""
    _, (*both, _, _, _, other) = suite
    assert [row["nproc"] for row in both] == [2, 2]
    for row in both:
        assert row["met"], row["problem"]
        assert {(c["name"], c["kind"], c["direction"]) for c in row["culprits"]} == {
            ("embedding.word_embeddings", "output", "forward")
        }
        assert float(row["margin"]) > 10
    assert other["met"], other["problem"]


@pytest.mark.slow
def test_nothing_hangs_on_the_id(suite: Suite) -> None:
    """With another number and expectation the same bug has the same verdicts, line for line."""
    first, second = (verdicts(suite[0] / f"{bug}-0-faulty") for bug in ("31", "35"))
    assert first == second
    assert any('"diverged"' in line or '"replica_conflict"' in line for line in first)


@pytest.mark.slow
def test_nothing_cheats(suite: Suite) -> None:
    """A fragment that Megatron lacks, one that is no fault, and the place of another fault."""
    _, (*_, absent, equal, misplaced, _) = suite
    assert not any(row["met"] for row in (absent, equal, misplaced))
    assert "occurs 0 times instead of once" in absent["problem"]
    assert "of megatron-core 0." in absent["problem"]
    assert (equal["detected"], misplaced["detected"]) == (False, True)
    assert equal["problem"].startswith("found equivalent")
    assert misplaced["problem"].startswith("names")


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
    code, output, errors = ttrace(None, *words, timeout=1800)
    bad = [(row["id"], row["problem"]) for row in rows(output) if not row["met"]]
    assert code == 0, (bad, errors[-2000:])


@pytest.mark.nightly
def test_isolated(tmp_path: Path) -> None:
    """With every input taken from the reference, only the culprit's module is red: 12 of 14."""
    words = ("bugs", "run", "--all", "--isolate", "--json", "--directory", str(tmp_path))
    _, output, errors = ttrace(None, *words, timeout=1800)
    found = rows(output)
    strays = {row["id"][:2] for row in found if not row["localised"]}
    assert len({row["id"][:2] for row in found}) == 14
    assert len(strays) <= 2, ([(row["id"], row["problem"]) for row in found], errors[-2000:])
    assert all(row["healthy"] for row in found)


@pytest.mark.nightly
def test_all_bugs_with_expectations_of_others(tmp_path: Path) -> None:
    """Wherever a bug is found, it is where this bug is."""
    found = run(tmp_path, ALL, scrambled(described(ALL)), timeout=1800)
    assert {row["id"] for row in found} == {name.split("-")[0] for name in ALL}
    assert [row["id"] for row in found if row["met"]] == []
    assert all(row["detected"] for row in found)
