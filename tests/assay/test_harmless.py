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
    return a, b, c, d
"""


def test_every_kind(tmp_path: Path) -> None:
    """All functions return what they returned, though the files differ as often as was asked."""
    file = tmp_path / "megatron" / "core" / "transformer" / "a.py"
    file.parent.mkdir(parents=True)
    before = "".join(map(FUNCTION.format, range(12)))
    file.write_text(before)
    done = harmless.plant(tmp_path, 8, seed=3)
    kinds = Counter(one.rpartition(" ")[2] for one in done)
    assert kinds == {"comment": 2, "log": 2, "rename": 2, "swap": 2}
    results = []
    for text in (before, file.read_text()):
        names: dict = {"__name__": "a"}
        exec(text, names)
        results.append([names[f"f{number}"](5, 7) for number in range(12)])
    assert results[0] == results[1]
    assert harmless.plant(tmp_path / "absent", 8, seed=3) == []
