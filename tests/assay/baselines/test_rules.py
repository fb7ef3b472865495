# SPDX-License-Identifier: Apache-2.0
"""Each rule at its threshold, and the gaps that the rules are known for."""

import pytest
import torch

from megatron_ttrace.trace.records import STEP_LEVEL, Kind, TraceKey
from tests.assay.baselines.rules import RULES, RunFacts, depth, theorem_bound
from tests.assay.baselines.statistics import statistics
from tests.assay.baselines.tally import OURS, Flagged, Pair, rule_rows

BY_NAME = {rule.name: rule for rule in RULES}
KEY = TraceKey(1, 0, Kind.OUTPUT, "decoder.layers.0.mlp")
BF16 = RunFacts(32, 2.0**-7)


def noisy(error, *, scale=1.0):
    """Statistics of a tensor with this relative error, at right angles to the reference."""
    generator = torch.Generator().manual_seed(2)
    r = torch.randn(4000, generator=generator, dtype=torch.float64) + 3.0
    noise = torch.randn(4000, generator=generator, dtype=torch.float64)
    noise -= r * (noise.dot(r) / r.dot(r))
    return statistics(scale * r + noise * (error * r.norm() / noise.norm()), r)


@pytest.mark.parametrize(
    ("rule", "passes", "flagged"),
    [
        ("sglang rel_diff 1e-3", 0.0446, 0.0449),
        ("miles 2e-3", 0.0632, 0.0635),
        ("miles 8.5e-3", 0.130, 0.132),
        ("theorem 5.3, depth fixed at 32", 0.0827, 0.0830),
    ],
)
def test_what_a_rule_lets_through(rule, passes, flagged):
    """In bf16; the percentages are those that the rules' formulas give."""
    assert not BY_NAME[rule].flags(KEY, noisy(passes), BF16)
    assert BY_NAME[rule].flags(KEY, noisy(flagged), BF16)


@pytest.mark.parametrize("name", [n for n in BY_NAME if n.startswith("msprobe")])
def test_msprobe_lets_a_halved_tensor_pass(name):
    """One half is not more than one half; a little less is seen."""
    rule = BY_NAME[name]
    assert not rule.flags(KEY, noisy(0.0, scale=0.5), BF16)
    assert rule.flags(KEY, noisy(0.0, scale=0.49), BF16)


def test_msprobe_raises_alarms_on_means_near_zero():
    """A mean that is a small difference of large numbers moves by more than itself."""
    r = torch.tensor([1.0, -1.0 + 1e-7], dtype=torch.float64)
    assert BY_NAME["msprobe first difference, all tensors"].flags(
        KEY, statistics(r + torch.tensor([1e-7, 0.0]), r), BF16
    )


def test_msprobe_looks_at_outputs_only():
    """Main gradients are not among them."""
    rule = BY_NAME["msprobe first difference, outputs"]
    grad = TraceKey(1, STEP_LEVEL, Kind.MAIN_GRAD, "decoder.layers.0.mlp.linear_fc1.weight")
    assert not rule.flags(grad, noisy(0.0, scale=3.0), BF16)
    assert rule.flags(KEY, noisy(0.0, scale=3.0), BF16)


def test_assert_close_needs_one_element():
    """However small its share of the whole."""
    r = torch.ones(100_000)
    c = r.clone()
    c[7] += 2e-5
    assert BY_NAME["torch.testing.assert_close"].flags(KEY, statistics(c, r), BF16)


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("decoder.layers.0.mlp", Kind.OUTPUT, 0),
        ("decoder.layers.0.mlp.linear_fc1.weight", Kind.MAIN_GRAD, 1),
        ("decoder.layers.31.mlp", Kind.GRAD_INPUT, 32),
        ("embedding.word_embeddings.weight", Kind.MAIN_GRAD, 0),
        ("decoder.final_layernorm.weight", Kind.MAIN_GRAD, 33),
        ("output_layer", Kind.GRAD_OUTPUT, 33),
    ],
)
def test_depth(name, kind, expected):
    """l counts layers from 1."""
    assert depth(TraceKey(1, 0, kind, name), 32) == expected


def test_the_published_bound():
    """8.3 % for the first of 32 layers in bf16, and less for later ones."""
    assert theorem_bound(33, 2.0**-7) == pytest.approx(0.083, abs=0.0005)
    assert theorem_bound(0, 2.0**-7) == pytest.approx(4 * 2.0**-7)


def flagged(*keys):
    """All rules flag the same."""
    names = [*BY_NAME, OURS]
    return Flagged(10, {name: frozenset(keys) for name in names})


def test_a_bug_counts_as_found_by_what_is_new():
    """A rule that flags the same tensors with and without the bug has not found it."""
    other = TraceKey(1, 0, Kind.OUTPUT, "other")
    third = TraceKey(1, 0, Kind.OUTPUT, "third")
    alarm = flagged(other)
    cases = [
        Pair("01/0", alarm, flagged(other), frozenset({KEY})),
        Pair("02/0", alarm, flagged(other, third), frozenset({KEY})),
        Pair("03/0", alarm, flagged(other, KEY), frozenset({KEY})),
        Pair("04a/0", alarm, flagged(other), frozenset({other})),
    ]
    table = rule_rows(cases, {"a": alarm, "b": flagged()})
    assert [line.rule for line in table] == [*BY_NAME, OURS]
    for line in table:
        assert line.missed == ("01/0", "04a/0")
        assert line.unlocated == ("01/0", "02/0", "04a/0")
        assert line.alarmed == ("a",)
        assert line.false_tensors == 1
