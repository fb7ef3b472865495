# SPDX-License-Identifier: Apache-2.0
"""The status of the GPU path is told as docs/gpu.json has it."""

import json

import pytest

from tests.gpu import document

LINE = {
    "test": "kernel",
    "result": "passed",
    "gpu": "NVIDIA H100 80GB HBM3",
    "torch": "2.11.0",
    "megatron": "0.19.2",
    "transformer_engine": "",
    "when": "2026-11-23T10:00:00+00:00",
}


@pytest.mark.parametrize(
    ("path", "table"), document.documents().items(), ids=lambda given: getattr(given, "name", "")
)
def test_documents_say_what_was_measured(path, table):
    """``python -m tests.gpu.document`` would change nothing."""
    text = path.read_text()
    assert document.replaced(text, table) == text
    assert all(line["gpu"] for line in json.loads(document.STORED.read_text()))


def test_errors_of_the_emulation():
    """One row per module, once a GPU wrote them: the largest of all its tensors."""
    assert "not yet" in document.render_emulation([LINE])
    figures = {"table": [["Linear", "bf16", "output", 0.5], ["Linear", "bf16", "grad", 0.25]]}
    told = document.render_emulation([{**LINE, "test": "te-emulation", "figures": figures}])
    assert "| module | bf16 |\n|---|---|\n| Linear | 0.5 |\n" in told


def test_what_was_not_tried_is_said():
    """Without lines every point is open; with some, what is missing and what failed is named."""
    assert document.render([]).count(document.NOT_YET) == len(document.POINTS)
    failed = {**LINE, "test": "bug-01", "result": "failed"}
    rows = {row[2:5]: row for row in document.render([LINE, failed]).splitlines()}
    assert "1 of 2 passed; kernel-speed: not yet tried | NVIDIA H100" in rows["(g)"]
    assert "0 of 3 passed; bug-01: failed" in rows["(c)"]
    assert document.NOT_YET in rows["(a)"]


def test_a_run_without_a_gpu_is_not_stored(tmp_path, monkeypatch):
    """A dry run proves nothing about GPUs."""
    stored = tmp_path / "gpu.json"
    stored.write_text("[]")
    monkeypatch.setattr(document, "STORED", stored)
    results = tmp_path / "gpu.jsonl"
    results.write_text(json.dumps(LINE) + "\n" + json.dumps({**LINE, "seconds": 2}) + "\n")
    document.add([results])
    assert json.loads(stored.read_text()) == [{**LINE, "seconds": 2}]
    results.write_text(json.dumps({**LINE, "gpu": ""}))
    with pytest.raises(ValueError, match="without a GPU"):
        document.add([results])
