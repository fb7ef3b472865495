# SPDX-License-Identifier: Apache-2.0
"""Nothing cheats: without the faults, or with another bug's expectations, the suite must fail."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_ttrace.jobs.resources import patches_dir
from tests.evaluation.bugs.test_suite import rows, ttrace

ALL = sorted(path.name for path in (patches_dir() / "bugs").glob("*.toml"))
TWO = ("01-tp-embedding-mask.toml", "11-sp-layernorm.toml")
_PATCH = re.compile(r'(fragment = """(.*?)"""\n)replacement = """.*?"""', re.DOTALL)


def described(names: Sequence[str], layouts: int | None = None) -> list[str]:
    """The descriptions, on demand with the first layouts only."""
    texts = [(patches_dir() / "bugs" / name).read_text() for name in names]
    return [text if layouts is None else _first_layouts(text, layouts) for text in texts]


def _first_layouts(text: str, count: int) -> str:
    head, *found = text.split("[[layout]]\n")
    found[-1], patches = found[-1].split("[[patch]]", 1)
    return "[[layout]]\n".join([head, *found[:count]]) + f"[[patch]]{patches}"


def harmless(text: str) -> str:
    """Every fragment replaced by itself."""
    changed, count = _PATCH.subn(lambda match: f'{match[1]}replacement = """{match[2]}"""', text)
    assert count == text.count("[[patch]]")
    return changed


def scrambled(texts: Sequence[str]) -> list[str]:
    """Each bug with the next one's expectation, as if their ids had been mixed up."""
    parts = [text.split("[expected]") for text in texts]
    return [
        f"{own[0]}[expected]{parts[(number + 1) % len(parts)][1]}"
        for number, own in enumerate(parts)
    ]


def run(folder: Path, names: Sequence[str], texts: Sequence[str], timeout: float) -> list[dict]:
    """The rows of a suite with this catalogue, which must fail."""
    catalogue = folder / "bugs"
    catalogue.mkdir()
    for name, text in zip(names, texts, strict=True):
        (catalogue / name).write_text(text)
    words = ("bugs", "run", "--all", "--json", "--directory", str(folder))
    code, output, errors = ttrace(catalogue, *words, timeout=timeout)
    assert code == 2, errors[-3000:]  # no run that should be healthy diverged
    return rows(output)


@pytest.mark.slow
@pytest.mark.parametrize("change", [scrambled, lambda texts: [harmless(text) for text in texts]])
def test_two_bugs(work: Path, change) -> None:
    """Mixed up they are found, and not where the other is expected; harmless ones are not found."""
    found = run(work, TWO, change(described(TWO, 1)), 280)
    assert [row["id"] for row in found] == ["01", "11"]
    for row in found:
        assert row["healthy"]
        assert not row["met"]
        assert row["detected"] == (change is scrambled)
        assert row["problem"].startswith("names" if change is scrambled else "found equivalent")


@pytest.mark.nightly
def test_all_bugs_with_expectations_of_others(tmp_path: Path) -> None:
    """Wherever a bug is found, it is where this bug is."""
    found = run(tmp_path, ALL, scrambled(described(ALL)), 1800)
    assert {row["id"] for row in found} == {name.split("-")[0] for name in ALL}
    assert [row["id"] for row in found if row["met"]] == []
    assert all(row["detected"] for row in found)


@pytest.mark.nightly
def test_all_bugs_without_their_faults(tmp_path: Path) -> None:
    """What is found is the fault: without it the same jobs are equivalent, or are refused."""
    found = run(tmp_path, ALL, [harmless(text) for text in described(ALL)], 1800)
    assert [row["id"] for row in found if row["met"]] == []
    assert {row["id"] for row in found if row["problem"] != "found equivalent"} == {"09"}
