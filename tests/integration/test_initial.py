# SPDX-License-Identifier: Apache-2.0
"""A wrong initialisation is found where it is, a right one raises no alarm in any layout."""

import json
import re
from pathlib import Path

import pytest

from megatron_ttrace.trace.records import Direction, Kind, Outcome
from tests.integration.jobs import PP, TP, ZERO, Checked, check, ttrace


def initial_of(checked: Checked) -> list:
    """Verdicts on initial values."""
    return [one for one in checked.verdicts if one.kind is Kind.INITIAL]


FAULTS = {
    "embedding.position_embeddings": (
        *(Outcome.REPLICA_CONFLICT, (0, 1)),
        "differ between ranks that hold the same part$",
        "tensor_parallel/random.py",
    ),
    "decoder.layers.0.mlp.linear_fc1": (
        *(Outcome.DIVERGED, (0, 1)),
        "initial values are lost: all 0; ",
        "features.py",
    ),
    "decoder.layers.0.mlp.linear_fc2": (
        *(Outcome.DIVERGED, (1,)),
        "initial values differ in distribution: .* std ",
        "features.py",
    ),
    "decoder.layers.1.mlp.linear_fc1": (
        *(Outcome.DIVERGED, (0, 1)),
        "unknown: .*bitwise equal to those of another part of it on rank 1$",
        "features.py",
    ),
    "decoder.final_layernorm": (
        *(Outcome.DIVERGED, (0, 1)),
        "all 0; in the reference all 1",
        "features.py",
    ),
}
"""What the mistake does, and how it must be reported."""


def test_faults(tmp_path: Path) -> None:
    """These modules are the culprits, no others; saved traces give the same answer."""
    saved = ("--ttrace-save-candidate",)
    checked = check(tmp_path, *TP, flags=saved, code=1, mistake="initial_values")
    culprits = {culprit.name: culprit for culprit in checked.summary.culprits}
    assert set(culprits) == set(FAULTS)
    for name, (outcome, ranks, words, place) in FAULTS.items():
        culprit = culprits[name]
        assert (culprit.kind, culprit.direction) == (Kind.INITIAL, Direction.START)
        assert (culprit.verdict, culprit.ranks) == (outcome, ranks)
        # Equal parts that did not come from one random state are reported without a cause.
        text = f"{culprit.explanation}: {culprit.reason}"
        assert re.search(words, text if words.startswith("unknown") else culprit.explanation)
        assert place in culprit.where, culprit.where
    wrong = {one.name for one in initial_of(checked) if one.verdict is not Outcome.PASS}
    assert wrong == {f"{name}.weight" for name in FAULTS}
    traces = [checked.out / side for side in ("reference", "candidate")]
    again = ttrace("compare", "--json", *traces, cwd=tmp_path, code=1)
    same = {one["name"]: one["explanation"] for one in json.loads(again.stdout)["culprits"]}
    assert same == {name: culprit.explanation for name, culprit in culprits.items()}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "layout",
    [
        (*TP, "--sequence-parallel"),
        PP,
        ZERO,
        "--expert-model-parallel-size 2 --num-experts 4 --moe-router-topk 2 "
        "--moe-token-dispatcher-type alltoall --disable-bias-linear".split(),
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
        "--ckpt-format fsdp_dtensor --untie-embeddings-and-output-weights".split(),
    ],
)
def test_healthy(layout, tmp_path: Path) -> None:
    """Every parameter is judged, and none is off; the layouts' own tests have no alarm either."""
    checked = check(tmp_path, *layout)
    initial = initial_of(checked)
    parameters = {one.name for one in checked.verdicts if (one.kind, one.index) == (Kind.PARAM, 0)}
    assert {one.name for one in initial} == parameters
    assert {one.verdict for one in initial} == {Outcome.PASS}
    assert any(one.margin > 0 for one in initial), "nothing random was judged"


def test_without_initialisation(tmp_path: Path) -> None:
    """Memory that nobody wrote to is not judged, dropout is off, and both is said.

    Ranks cannot draw the reference's masks.
    """
    dropout = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
    checked = check(tmp_path, *TP, "--no-initialization", *dropout)
    assert "not exercised: dropout" in checked.said
    assert not initial_of(checked)
    assert "--no-initialization: initial values are not judged" in checked.summary.notices
