# SPDX-License-Identifier: Apache-2.0
"""A pipeline is bitwise its reference, and one changed bit is told although everything passes."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from megatron_ttrace.report.wording import note_text
from megatron_ttrace.trace.findings import Note, Remark
from megatron_ttrace.trace.records import Kind, TraceKey
from megatron_ttrace.trace.store import TraceReader, seal
from tests.integration.jobs import PP, check, ttrace

KEY = TraceKey(1, 0, Kind.OUTPUT, "decoder.layers.1.mlp.linear_fc2")


def flip_a_bit(candidate: Path, rank: int) -> None:
    """The last bit of one element of one saved tensor."""
    reader = TraceReader(candidate)
    entry = next(entry for entry in reader.ranks[rank] if entry.key == KEY)
    tensors = load_file(candidate / entry.file)
    tensors[entry.tensor].view(torch.int32).view(-1)[7] ^= 1
    save_file(tensors, candidate / entry.file)
    written = {"format", "run", "files"}
    seal(candidate, {name: value for name, value in reader.meta.items() if name not in written})


def test_one_bit(tmp_path: Path) -> None:
    """PP 2, saved, one bit flipped, compared again."""
    checked = check(tmp_path, *PP, flags=("--ttrace-save-candidate",))
    done, out = checked.done, checked.out
    assert "must be bitwise equal in this layout: all are" in " ".join(done.stdout.split())
    kept = json.loads((out / "summary.json").read_text())["exactness"]
    assert kept["expected"] > 200
    assert (kept["lost"], kept["first"], kept["rel_err"]) == (0, "", None)

    flip_a_bit(out / "candidate", 1)
    again = ttrace("compare", out / "reference", out / "candidate", cwd=tmp_path, code=0)
    assert "not bitwise equal" in " ".join(again.stdout.split())
    lost = json.loads((out / "summary.json").read_text())["exactness"]
    assert lost["expected"] == kept["expected"]
    assert 1 <= lost["lost"] <= 3  # the tensor's other names
    assert lost["first"] == str(KEY)
    assert lost["ranks"] == [1]
    assert lost["rel_err"] < 1e-6
    verdicts = [json.loads(line) for line in (out / "verdicts.jsonl").open()]
    assert note_text(Note(Remark.NOT_BITWISE)) in next(
        v["note"] for v in verdicts if str(KEY.name) == v["name"] and v["rel_err"]
    )
