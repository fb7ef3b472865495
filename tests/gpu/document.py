# SPDX-License-Identifier: Apache-2.0
"""The tables of what was tried on a GPU, and of the emulation's errors, in the documents.

``python -m tests.gpu.document [gpu.jsonl ...]`` adds what ``make gpu`` wrote to docs/gpu.json, and
writes the tables anew; a test compares.
"""

import json
import sys
from pathlib import Path
from typing import Any

from tests.gpu.tests_of_make import TESTS
from tests.integration.jobs import ROOT

STORED = ROOT / "docs" / "gpu.json"
STATUS = ROOT / "docs" / "gpu.md"
EMULATION = ROOT / "docs" / "cpu-te.md"
BEGIN = "<!-- made by: python -m tests.gpu.document -->\n"
END = "<!-- end -->\n"
POINTS = {
    "a": "one rank, fp32 and bf16; training bitwise the same with and without `--ttrace`",
    "b": "TP 2, TP 2 + SP, PP 2, DP 2 with ZeRO-1 and overlap, EP 2",
    "c": "known bugs 01, 05, 11 diverge, at the module that a CPU run names",
    "d": "CPU reference, GPU candidate, and the reverse, in fp32",
    "e": "separate streams; equal verdicts in a blocking run; `compute-sanitizer`",
    "f": "time and peak memory of traced steps at 0.3 and 1 B parameters, bf16",
    "g": "fused comparison kernel: the CPU's numbers for every pair of dtypes; GB/s",
    "te": "TransformerEngine for real: (a) to (c), FP8, emulation against it",
}
NOT_YET = "not yet tried"
_GOOD = "passed"


def add(paths: list[Path]) -> None:
    """Store the lines of a run; the latest line of each test counts.

    Raises:
        ValueError: for a line that no GPU wrote.
    """
    latest = {line["test"]: line for line in json.loads(STORED.read_text(encoding="utf-8"))}
    for path in paths:
        for text in path.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            if not line["gpu"]:
                raise ValueError(f"{path}: {line['test']} ran without a GPU")
            latest[line["test"]] = line
    STORED.write_text(json.dumps(list(latest.values()), indent=1) + "\n", encoding="utf-8")


def render(lines: list[dict[str, Any]]) -> str:
    """The table, between its marks."""
    rows = [
        "| on a GPU | result | |",
        "|---|---|---|",
        *(_row(point, what, lines) for point, what in POINTS.items()),
    ]
    return BEGIN + "".join(f"{row}\n" for row in rows) + END


def _row(point: str, what: str, lines: list[dict[str, Any]]) -> str:
    is_te = point == "te"
    names = [
        f"te-{test.name}" if is_te else test.name
        for test in TESTS
        if is_te in test.stages and (is_te or test.point == point)
    ]
    tried = [line for line in lines if line["test"] in names]
    shown = "" if is_te else f"({point}) "
    if not tried:
        return f"| {shown}{what} | **{NOT_YET}** | |"
    passed = sum(line["result"] == _GOOD for line in tried)
    result = f"{passed} of {len(names)} passed"
    others = [f"{line['test']}: {line['result']}" for line in tried if line["result"] != _GOOD]
    missing = [name for name in names if name not in {line["test"] for line in tried}]
    others += [f"{name}: {NOT_YET}" for name in missing]
    last = max(tried, key=lambda line: line["when"])
    versions = [f"Megatron {last['megatron']}"]
    if is_te:
        versions += [f"TransformerEngine {last['transformer_engine']}", f"PyTorch {last['torch']}"]
    cells = "; ".join([result, *others]), ", ".join([last["gpu"], *versions, last["when"][:10]])
    return f"| {shown}{what} | {' | '.join(cells)} |"


def render_emulation(lines: list[dict[str, Any]]) -> str:
    """How far each emulated module is from TransformerEngine's, between marks."""
    tables = [line["figures"].get("table") for line in lines if line["test"] == "te-emulation"]
    if not any(tables):
        return f"{BEGIN}The emulation has **not yet** been compared with TransformerEngine.\n{END}"
    worst: dict[str, dict[str, float]] = {}
    for module, precision, _, error in tables[0]:
        by_precision = worst.setdefault(module, {})
        by_precision[precision] = max(by_precision.get(precision, 0.0), error)
    shown = sorted({precision for errors in worst.values() for precision in errors})
    rows = [f"| module | {' | '.join(shown)} |", f"|---|{'---|' * len(shown)}"]
    for module, errors in worst.items():
        cells = (f"{errors[one]:.2g}" if one in errors else "" for one in shown)
        rows.append(f"| {module} | {' | '.join(cells)} |")
    return BEGIN + "".join(f"{row}\n" for row in rows) + END


def documents() -> dict[Path, str]:
    """What each document must have between its marks."""
    lines = json.loads(STORED.read_text(encoding="utf-8"))
    return {STATUS: render(lines), EMULATION: render_emulation(lines)}


def replaced(text: str, table: str) -> str:
    """``text`` with the table in the place of the one that it has."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin, "no mark where the table begins"
    assert end, "no mark where the table ends"
    return before + table + after


def main(paths: list[Path]) -> None:
    """Store, and write the documents."""
    add(paths)
    for path, table in documents().items():
        path.write_text(replaced(path.read_text(encoding="utf-8"), table), encoding="utf-8")


if __name__ == "__main__":
    main([Path(word) for word in sys.argv[1:]])
