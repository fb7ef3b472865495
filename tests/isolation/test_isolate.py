# SPDX-License-Identifier: Apache-2.0
"""``--ttrace-isolate``: tensors go on with the reference's values, graphs and runs stay whole."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ttrace.capture.isolate import clipped_by, substitute
from megatron_ttrace.trace.records import Kind
from tests.capture.recorder import Recorder, tapped
from tests.integration.jobs import TP, check
from tests.integration.test_layouts import rows_of

LAYOUTS = ("tp2", "pp2", "pp2-vpp2", "dp2-zero", "recompute-uniform", "recompute-selective")
JOBS = (
    *(f"{layout}/{model}" for layout in LAYOUTS for model in ("gpt", "llama")),
    *("tp2-sp/gpt", "te-tp2-sp/llama-te", "cp2/gpt-te", "cp2/llama-te"),
)


def test_substitute_keeps_the_graph() -> None:
    """The values of one tensor, exactly, and the gradient path of the other."""
    x = torch.randn(4, requires_grad=True)
    values = torch.randn(4)
    y = substitute(x * 2, values)
    assert torch.equal(y, values)
    (y * y).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, values * 2 * 2)


def test_substitute_is_no_view() -> None:
    """Megatron's cross entropy writes into the logits it is given."""
    x = torch.randn(4, requires_grad=True)
    y = substitute(x * 2, torch.ones(4))
    y.mul_(3)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((4,), 6.0))


def test_replaced_tensors_are_still_one_tensor() -> None:
    """The gradient of an output and of the input it becomes are one, replaced or not."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    sink = Recorder()
    sink.instead[0, Kind.OUTPUT, "0", 0] = torch.ones(2, 3)
    sink.instead[0, Kind.INPUT, "1", 0] = torch.zeros(2, 3)
    with tapped([model], sink):
        model(torch.ones(2, 3)).sum().backward()
    out, into = sink.values[0, Kind.GRAD_OUTPUT, "0", 0], sink.values[0, Kind.GRAD_INPUT, "1", 0]
    assert torch.equal(out, into)


def test_gradients_are_clipped_by_the_references_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positionally and by name; parameters that are clipped on their own keep their norm."""
    from megatron.core.optimizer import optimizer

    used: list[Any] = []

    def clip(parameters: Any, max_norm: float, total_norm: Any, **_: Any) -> None:
        assert [*parameters]
        used.append(total_norm)

    monkeypatch.setattr(optimizer, "clip_grad_by_total_norm_fp32", clip)
    parameter, grouped = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    grouped.grad_norm_group = "embedding"  # type: ignore[attr-defined]
    with clipped_by(torch.tensor(2.0)):
        optimizer.clip_grad_by_total_norm_fp32([parameter], 1.0, 5.0, use_decoupled_grad=False)
        optimizer.clip_grad_by_total_norm_fp32([parameter], max_norm=1.0, total_norm=5.0)
        optimizer.clip_grad_by_total_norm_fp32(iter([grouped]), 1.0, 5.0)
    assert optimizer.clip_grad_by_total_norm_fp32 is clip
    with clipped_by(None):
        # As a trace stores it.
        optimizer.clip_grad_by_total_norm_fp32([parameter], 1.0, 0.1)
    assert used == [2.0, 2.0, 5.0, torch.tensor(0.1).item()]
    with clipped_by(torch.tensor(2.0)):
        optimizer.clip_grad_by_total_norm_fp32([parameter], 1.0, torch.tensor([5.0]))
    assert isinstance(used[-1], torch.Tensor)
    assert used[-1].tolist() == [2.0]


@pytest.mark.slow
def test_two_faults(tmp_path: Path) -> None:
    """Both spoilt modules are red and nothing else.

    How much is red without isolation is in docs/tutorial.md, whose numbers are tested.
    """
    checked = check(tmp_path, *TP, flags=("--ttrace-isolate",), code=1, mistake="two_modules")
    modules = {
        "decoder.layers.0.self_attention.linear_qkv",
        "decoder.layers.1.mlp.linear_fc2",
    }
    names = {one.name.removesuffix(".weight").removesuffix(".bias") for one in checked.failed}
    assert names == modules
    culprits = checked.summary.culprits
    assert {culprit.name for culprit in culprits} == modules
    outputs = {one.name: one.explanation for one in culprits if one.kind is Kind.OUTPUT}
    assert outputs.keys() == modules
    assert all("1.010 times too large" in text for text in outputs.values())


@pytest.mark.slow
def test_rounding_does_not_spread_in_16_bits(tmp_path: Path) -> None:
    """Replays are isolated, too: without that, the tolerance of this gradient is 0.048."""
    checked = check(tmp_path, *TP, "--bf16", flags=("--ttrace-isolate",))
    name = "decoder.layers.0.self_attention.linear_qkv"
    gradients = [one for one in checked.verdicts if (one.kind, one.name) == (Kind.GRAD_INPUT, name)]
    assert gradients
    assert all(0.0 < one.tolerance < 0.03 for one in gradients)
    assert max(one.margin or 0.0 for one in checked.verdicts) < 0.5


@pytest.mark.nightly
@pytest.mark.parametrize("job", JOBS)
def test_all_healthy_layouts(work: Path, job: str) -> None:
    """Every layout, of both models, in both precisions, is equivalent."""
    rows = rows_of(f"{job}/fp32", f"{job}/bf16", "--ttrace-flags=--ttrace-isolate", cwd=work)
    assert [row["verdict"] for row in rows] == ["equivalent"] * 2
