# SPDX-License-Identifier: Apache-2.0
"""What is switched on for a rehearsal."""

import sys
import types

import pytest
import torch
from torch.nn.functional import dropout as imported

from megatron_ttrace.mcore import quiet


@pytest.mark.parametrize("name", ["qk_clip_threshold", "activation_func_clamp_value"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("before", "is_above"), [(100, True), (0.05, False), (None, False)])
def test_what_clips_acts(
    name: str, dtype: torch.dtype, before: float | None, is_above: bool
) -> None:
    """Modules share a config; a threshold is lowered, if there is one, that of MLPs in float32."""
    config = types.SimpleNamespace(**{name: before}, params_dtype=dtype)
    model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Identity())
    for module in (*model, model):
        module.config = config
    acts = is_above and (name == "qk_clip_threshold" or dtype == torch.float32)
    with quiet.clipped([model]):
        assert getattr(config, name) == (quiet._THRESHOLDS[name] if acts else before)
    assert getattr(config, name) == before


def test_a_trace_of_routers_has_no_step_of_a_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it end sooner (``RouterTracer``)."""
    tracer = types.SimpleNamespace(_stopped=False, max_steps=1, steps=0)
    name = "megatron.core.transformer.moe.router_trace"
    module = types.SimpleNamespace(get_moe_router_tracer=lambda: tracer)
    monkeypatch.setitem(sys.modules, name, module)
    before = dict(vars(tracer))
    with quiet.metrics_kept():
        assert tracer._stopped
        tracer.steps += 1
        assert tracer.steps < tracer.max_steps
    assert vars(tracer) == before


def test_a_rehearsal_dumps_nothing() -> None:
    """What Megatron would write in a step; a release may lack some of the options."""
    args = types.SimpleNamespace(save_tokens_per_expert_interval=1, save_interval=2)
    before = dict(vars(args))
    with quiet.without_dumps(args):
        assert vars(args) == before | {"save_tokens_per_expert_interval": None}
    assert vars(args) == before


def test_dropout_that_only_a_function_is_given() -> None:
    """A fork's attribute may have any name; it is noticed, and masks of probability 0 are not."""
    ones, calls = torch.ones(100), []
    dropout = torch.nn.functional.dropout
    for off in (0.0, quiet.Off()):
        with quiet.without_dropout([], off, lambda: calls.append(1)):
            assert torch.equal(torch.nn.functional.dropout(ones, 0.5), ones)
            torch.nn.functional.dropout(ones, 0.0)
            torch.nn.functional.dropout(ones, 0.5, training=False)
    assert calls == [1, 1]
    assert torch.nn.functional.dropout is dropout


@pytest.mark.parametrize("name", quiet._DROPOUTS)
def test_every_function_of_dropout(name: str) -> None:
    """It is switched off however its arguments are given."""
    dims = {"dropout1d": 3, "dropout2d": 4}.get(name, 5)
    ones, calls = torch.ones(*range(2, 2 + dims)), []
    dropout = getattr(torch.nn.functional, name)
    with quiet.without_dropout([], 0.0, lambda: calls.append(1)):
        function = getattr(torch.nn.functional, name)
        assert torch.equal(function(ones, 0.5, True), ones)
        assert torch.equal(function(ones, p=0.5, training=True), ones)
        assert torch.equal(function(ones, 0.5, training=False), ones)
    assert calls == [1, 1]
    assert getattr(torch.nn.functional, name) is dropout


def test_dropout_by_another_name() -> None:
    """What a module imported, or calls directly; attention's."""
    x, calls = torch.ones(2, 3, 4, 5), []
    attention = torch.nn.functional.scaled_dot_product_attention
    expected = attention(x, x, x, None)
    with quiet.without_dropout([], 0.0, lambda: calls.append(1)):
        for inplace in (False, True):
            assert torch.equal(imported(x.clone(), 0.5, inplace=inplace), x)
        assert torch.equal(torch.dropout(x, 0.5, True), x)
        assert torch.equal(torch.dropout(x, p=0.5, train=True), x)
        assert torch.equal(torch.dropout(x, p=0.5, train=False), x)
        function = torch.nn.functional.scaled_dot_product_attention
        assert torch.equal(function(x, x, x, None, 0.5), expected)
        assert torch.equal(function(x, x, x, dropout_p=0.5), expected)
        assert torch.equal(function(x, x, x), expected)
    assert len(calls) == 6
    assert torch.nn.functional.scaled_dot_product_attention is attention
    assert (imported(x, 0.5) != x).any()


def test_random_numbers_that_were_drawn() -> None:
    before = quiet.drawn_from()
    assert quiet.drawn_from() == before
    torch.rand(1)
    assert quiet.drawn_from() != before
