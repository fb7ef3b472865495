# SPDX-License-Identifier: Apache-2.0
"""Changes that change nothing."""

from collections import Counter
from pathlib import Path

from tests.assay import harmless

FUNCTION = """
def f{0}(x, y):
    a = x + {0}
    b = y * 2
    c = [a * b for _ in range(3)]
    d = f"{{a}} of {{b}}"
    e = a if x is not None else b
    return a, b, c, d, e
"""
COUNT = 24


def test_every_kind(tmp_path: Path) -> None:
    """All functions return what they returned, though the files differ as often as was asked."""
    file = tmp_path / "megatron" / "core" / "transformer" / "a.py"
    file.parent.mkdir(parents=True)
    before = "".join(map(FUNCTION.format, range(COUNT)))
    file.write_text(before)
    done = harmless.plant(tmp_path, 14, seed=3)
    kinds = Counter(one.rpartition(" ")[2] for one in done)
    names = ("rename", "compute", "commute", "swap", "invert", "log", "comment")
    assert kinds == dict.fromkeys(names, 2)
    results = []
    for text in (before, file.read_text()):
        names: dict = {"__name__": "a"}
        exec(text, names)
        results.append([names[f"f{number}"](5, 7) for number in range(COUNT)])
    assert results[0] == results[1]
    assert harmless.plant(tmp_path / "absent", 8, seed=3) == []


def test_preferred_functions(tmp_path: Path) -> None:
    """They get two thirds of the changes; and some text is left alone."""
    file = tmp_path / "megatron" / "core" / "transformer" / "a.py"
    file.parent.mkdir(parents=True)
    file.write_text("".join(map(FUNCTION.format, range(COUNT))))
    sites = harmless.sites(tmp_path)
    preferred = [site for site in sites if site.function in {"f3", "f5", "f7"}]
    others = [site for site in sites if site not in preferred]
    kept = "a = x + 7\n    b = y * 2"
    done = harmless.plant(tmp_path, 12, 3, [preferred, others], [kept])
    assert sum(any(f":{site.function}:" in one for site in preferred) for one in done) == 8
    assert kept in file.read_text()
