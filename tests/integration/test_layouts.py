# SPDX-License-Identifier: Apache-2.0
"""Healthy layouts raise no alarm, and hardly anything stays unjudged."""

import json
from pathlib import Path

import pytest

from megatron_ttrace.evaluation.matrix import configurations as matrix
from tests.integration.jobs import ttrace

LAYOUTS = (
    *("tp2", "tp2-sp", "pp2", "pp2-vpp2", "dp2", "dp2-zero", "dp2-zero-overlap"),
    *("tp2-pp2", "tp2-sp-dp2", "pp2-dp2-zero", "recompute-uniform"),
)
EVERYTHING = matrix.configurations()
PROMISED = (
    # Each layout with one of the models in one precision; all of them run nightly.
    *(
        # Megatron's local RMSNorm does not support sequence parallelism.
        f"{layout}/{'gpt' if number % 2 or '-sp' in layout else 'llama'}/"
        f"{('fp32', 'bf16')[number // 2 % 2]}"
        for number, layout in enumerate(LAYOUTS)
    ),
    # One of each of the others.
    *("cp2/llama-te/fp32", "tp2-sp-ep2-etp2/moe-te/bf16", "ep2-alltoall/moe-deep/fp32"),
    "pp2-vpp2-dp2-zero-step/gpt/bf16",
    *("tp2-sp/gpt-te/fp8-tensorwise", "tp2-sp-ep2/moe-te/fp8-blockwise"),
    *("tp2-sp-dp2-shards4-zero-overlap/llama-te/bf16", "ep2-dp4-shards2/moe-te/fp32"),
)

PARTS = {
    *(f"{layout}/llama/fp32" for layout in ("tp2", "dp2")),
    *("tp2-sp/gpt/fp32", "pp2/llama/bf16", "pp2-vpp2/gpt/bf16", "dp2-zero/gpt/fp32"),
    *("dp2-zero-overlap/llama/bf16", "ep2-alltoall/moe-deep/fp32", "tp2-sp/gpt-te/fp8-tensorwise"),
    *("tp2-sp-dp2/gpt/fp32", "pp2-dp2-zero/gpt/fp32"),
    "tp2-sp-dp2-shards4-zero-overlap/llama-te/bf16",
}
"""What others of the promised ones contain, or another test checks."""

UNCHECKED = {"soap-tp2": 0.07}
"""Shares that depend on the layout by design (``own shard``)."""


def rows_of(*words: object, cwd: Path) -> list[dict]:
    """The rows of a matrix run."""
    done = ttrace("matrix", "--json", "--directory", cwd, *words, cwd=cwd, timeout=3500)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert rows, done.stderr[-3000:]
    return rows


def alarms(rows: list[dict]) -> list[str]:
    """Rows that are not what they must be: healthy, or a fault of Megatron's that is known."""
    return [
        f"{row['name']}: {row['verdict']}, worst margin {row['worst_margin']:.3g} {row['worst']}, "
        f"{row['unchecked']} of {row['tensors']} unchecked; {row['inexact']} of {row['exact']} not "
        f"bitwise; {row['why']}"
        for row in rows
        if (row["verdict"] == "equivalent") == bool(row["finding"])
        or (not row["finding"] and (row["worst_margin"] > 0.5 or row["inexact"]))
        or row["unchecked"] > UNCHECKED.get(row["name"].partition("/")[0], 0.01) * row["tensors"]
    ]


def test_enough_is_promised() -> None:
    """Each pattern names configurations."""
    assert all(matrix.select(EVERYTHING, [pattern]) for pattern in PROMISED)
    assert len(matrix.select(EVERYTHING, PROMISED)) >= 16
    assert {*PROMISED} > PARTS


@pytest.mark.parametrize(
    "pattern",
    [pytest.param(p, marks=[pytest.mark.nightly] if p in PARTS else []) for p in PROMISED],
)
def test_the_promised_layouts(work: Path, pattern: str) -> None:
    """Every layout that the README promises."""
    assert not alarms(rows_of(pattern, cwd=work))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [1234, 7])
def test_the_whole_matrix(work: Path, seed: int) -> None:
    """Everything, on two seeds."""
    assert not alarms(rows_of("--all", "--seed", seed, cwd=work))


@pytest.mark.nightly
@pytest.mark.parametrize("flags", ["--ttrace-iterations 1-3", "--ttrace-init megatron"])
def test_other_starts(work: Path, flags: str) -> None:
    """Later steps and Megatron's own start values are judged as well, and raise no alarm."""
    [row] = rows_of("tp2/gpt/fp32", f"--ttrace-flags={flags}", cwd=work)
    assert not alarms([row])
    assert row["tensors"] > (2000 if "iterations" in flags else 600)


def test_a_later_step(work: Path) -> None:
    """Its schedule of the learning rate and its routers' biases start as the reference's."""
    [row] = rows_of("ep2-alltoall/moe-deep/fp32", "--ttrace-flags=--ttrace-iterations 3", cwd=work)
    assert not alarms([row])


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_several_iterations(work: Path) -> None:
    """No drift into alarms over five steps, no tensor going blind."""
    some = [f"{layout}/{model}/*" for layout in LAYOUTS for model in ("gpt", "llama")]
    rows = rows_of(*some, "--ttrace-flags=--ttrace-iterations 1-5", cwd=work)
    assert len(rows) >= 20
    assert not alarms(rows)
