# SPDX-License-Identifier: Apache-2.0
"""Aggregation, tested with tables."""

import dataclasses
import math

import pytest

from megatron_ttrace.report import table
from megatron_ttrace.trace.outcomes import Reason
from megatron_ttrace.trace.records import Direction, Kind, Outcome, Verdict
from tests.report.synthetic_report import embedding_bug, make_verdict, norm_bug


@pytest.mark.parametrize(
    ("name", "layer", "tail"),
    [
        ("embedding.word_embeddings", "embedding", "embedding.word_embeddings"),
        ("embedding", "embedding", "embedding"),
        ("decoder.layers.0.mlp.linear_fc1", "decoder.layers.0", "mlp.linear_fc1"),
        ("decoder.layers.17.mlp.linear_fc1.weight", "decoder.layers.17", "mlp.linear_fc1.weight"),
        ("decoder.layers.3", "decoder.layers.3", "layer"),
        ("decoder", "decoder", "decoder"),
        ("decoder.final_layernorm", "decoder.final_layernorm", "final_layernorm"),
        ("decoder.final_layernorm.weight", "decoder.final_layernorm", "final_layernorm.weight"),
        (
            "decoder.layers.1.mlp.experts.local_experts.7.linear_fc2",
            "decoder.layers.1",
            "mlp.experts.local_experts.*.linear_fc2",
        ),
        ("mtp.layers.0.eh_proj", "mtp.layers.0", "eh_proj"),
        ("mtp.layers.0.transformer_layer.mlp", "mtp.layers.0", "transformer_layer.mlp"),
        ("output_layer", "output_layer", "output_layer"),
        ("output_layer.weight", "output_layer", "output_layer.weight"),
        ("vision_model.decoder.layers.2.mlp", "vision_model.decoder.layers.2", "mlp"),
        ("grad_norm", "grad_norm", "grad_norm"),
        ("loss", "loss", "loss"),
        ("", table.UNNAMED, table.UNNAMED),
        ("layers.x.mlp", "layers", "layers.x.mlp"),
    ],
)
def test_names_fall_into_layers(name: str, layer: str, tail: str) -> None:
    """Every name has a layer and a column."""
    assert table.split_name(name, {"decoder", "mtp"}) == (layer, tail)


def test_layers_are_in_the_order_of_execution() -> None:
    """By their outputs: the model itself, which is given its inputs first, ends last."""
    kinds = {"model": Kind.INPUT, "tokens": Kind.TOKENS, "output_layer.weight": Kind.PARAM}
    names = ["output_layer.weight", "tokens", "model", "embedding", "decoder.layers.2.mlp"]
    names += ["decoder.layers.10", "decoder.final_layernorm", "output_layer"]
    verdicts = [make_verdict(name, kinds.get(name, Kind.OUTPUT)) for name in names]
    verdicts += [make_verdict("model"), make_verdict("loss", Kind.LOSS)]
    layers = (
        "embedding",
        "decoder.layers.2",
        "decoder.layers.10",
        "decoder.final_layernorm",
        "output_layer",
        "model",
    )
    assert table.heat_map(verdicts).layers == (*layers, table.WHOLE_STEP)
    rows = sorted(table.layer_rows(verdicts), key=lambda row: row.depth)
    assert tuple(dict.fromkeys(row.layer for row in rows)) == ("tokens", *layers, "loss")


def alike(layers: int, *odd: int) -> list[Verdict]:
    """Layers that pass, but for the odd ones."""
    return [
        make_verdict(
            f"decoder.layers.{layer}.mlp",
            kind,
            rel_err=layer * 1e-4,
            verdict=Outcome.DIVERGED if layer in odd else Outcome.PASS,
        )
        for layer in range(layers)
        for kind in (Kind.INPUT, Kind.OUTPUT)
    ]


@pytest.mark.parametrize(
    ("verdicts", "rows"),
    [
        (alike(4), ["decoder.layers.0-3"]),
        (alike(2), ["decoder.layers.0", "decoder.layers.1"]),
        (alike(7, 3), ["decoder.layers.0-2", "decoder.layers.3", "decoder.layers.4-6"]),
        (alike(4)[:-1], ["decoder.layers.0-2", "decoder.layers.3"]),
        ([*alike(5)[:4], *alike(5)[6:]], [f"decoder.layers.{n}" for n in (0, 1, 3, 4)]),
        ([make_verdict(name) for name in "abcd"], list("abcd")),
    ],
)
def test_layers_alike_are_one_row(verdicts: list[Verdict], rows: list[str]) -> None:
    """At least three neighbours that pass and fail in the same cells, whatever their margins."""
    heat_map = table.heat_map(verdicts)
    names = table.folds(heat_map)
    assert list(dict.fromkeys(names.get(layer, layer) for layer in heat_map.layers)) == rows


def test_rows_with_failures_are_in_the_order_of_the_error() -> None:
    """The culprit's first, however small its margin; then as they were computed."""
    summary, verdicts = embedding_bug()
    rows = table.failing_rows(verdicts, summary.culprits)
    assert [(row.layer, row.direction.value) for row in rows[:3]] == [
        ("embedding", "forward"),
        ("decoder.layers.0", "forward"),
        ("decoder.layers.1", "forward"),
    ]
    assert [row.first for row in rows[1:]] == sorted(row.first for row in rows[1:])
    assert all(verdicts[row.first].verdict.is_failure for row in rows)
    late = dataclasses.replace(summary.culprits[0], name="grad_norm", kind=Kind.GRAD_NORM)
    late = dataclasses.replace(late, direction=Direction.GRADIENT, microbatch=-1)
    assert table.failing_rows(verdicts, [late])[0].layer == "grad_norm"


def test_stacks_are_found_in_the_names() -> None:
    """What stands in front of numbered layers; a layer without a number is none."""
    names = ("a.layers.0", "b.c.layers.12.mlp", "layers.3", "d.layers.x", "e")
    assert table.stacks_of(map(make_verdict, names)) == {"a", "b.c", ""}


@pytest.mark.parametrize(
    ("outcome", "rel_err", "tolerance", "expected"),
    [
        (Outcome.PASS, 1e-3, 2e-3, (1, 0.5)),
        (Outcome.PASS, None, None, (1, -1.0)),
        (Outcome.PASS, math.nan, 1e-3, (1, math.inf)),
        (Outcome.DIVERGED, 4e-3, 2e-3, (2, 2.0)),
        (Outcome.MISSING, None, None, (2, math.inf)),
        (Outcome.NONFINITE, math.nan, 1e-3, (2, math.inf)),
        (Outcome.REPLICA_CONFLICT, 1e-3, 2e-3, (2, 0.5)),
        (Outcome.UNCHECKED, 0.8, 0.9, (0, -1.0)),
    ],
)
def test_severity(
    outcome: Outcome, rel_err: float | None, tolerance: float | None, expected: tuple[int, float]
) -> None:
    """A failure outranks every pass, also one whose margin is small or unknown."""
    verdict = make_verdict(verdict=outcome, rel_err=rel_err, tolerance=tolerance)
    assert table.severity(verdict) == expected


def test_worst_is_the_earliest_of_equals() -> None:
    """Errors propagate forward, so of two equal ones the first says more."""
    first = make_verdict("a", verdict=Outcome.DIVERGED)
    assert table.worst_of([make_verdict("z"), first, make_verdict("b", verdict=first.verdict)]) is (
        first
    )
    assert table.worst_of([]) is None


def test_layer_rows_are_worst_first_and_complete() -> None:
    """No verdict is lost between the list and the rows."""
    _, verdicts = norm_bug()
    rows = table.layer_rows(verdicts)
    assert (rows[0].layer, rows[0].direction) == ("decoder.final_layernorm", Direction.GRADIENT)
    assert rows[0].group.failures == 1
    assert sum(row.group.total for row in rows) == len(verdicts)
    assert sum(row.group.unchecked for row in rows) == 7
    levels = [table.severity(row.group.worst) for row in rows]
    assert levels == sorted(levels, reverse=True)


def test_an_unmeasured_failure_comes_first() -> None:
    """A missing layer is worse than any error."""
    rows = table.layer_rows(
        [
            make_verdict("decoder.layers.0.mlp", verdict=Outcome.DIVERGED, rel_err=5.0),
            make_verdict(
                "decoder.layers.1.mlp", verdict=Outcome.MISSING, rel_err=None, tolerance=None
            ),
        ]
    )
    assert [row.layer for row in rows] == ["decoder.layers.1", "decoder.layers.0"]
    assert table.margin_of(rows[0].group.worst) == math.inf
    assert table.layer_margins(rows)["decoder.layers.1"] == table.UNMEASURED_MARGIN


def test_heat_map_keeps_the_worst_of_each_cell() -> None:
    """Four microbatches are one cell, coloured by the worst of them."""
    verdicts = [
        make_verdict(rel_err=error, microbatch=microbatch)
        for microbatch, error in enumerate((1e-4, 3e-3, 2e-4, 1e-5))
    ]
    heat_map = table.heat_map(verdicts)
    column = table.Column(Direction.FORWARD, "mlp", Kind.OUTPUT)
    cell = heat_map.cells[("decoder.layers.0", column)]
    assert cell.worst is verdicts[1]
    assert cell.total == 4


def test_heat_map_covers_everything() -> None:
    """Columns come direction by direction; cells count every verdict once."""
    _, verdicts = embedding_bug()
    heat_map = table.heat_map(verdicts)
    directions = [list(Direction).index(column.direction) for column in heat_map.columns]
    assert directions == sorted(directions)
    assert sum(cell.total for cell in heat_map.cells.values()) == len(verdicts)
    assert set(heat_map.layers) == {layer for layer, _ in heat_map.cells}
    assert (heat_map.layers[0], heat_map.layers[-1]) == ("embedding", table.WHOLE_STEP)


def test_unchecked_reasons_are_grouped() -> None:
    """Notes differ from tensor to tensor and are not read."""
    reasons = [Reason.BLIND, Reason.BLIND, None, Reason.UNDEFINED]
    verdicts = [
        make_verdict(verdict=Outcome.UNCHECKED, note=f"blind: {number}", reason=reason)
        for number, reason in enumerate(reasons)
    ]
    assert table.unchecked_reasons([*verdicts, make_verdict(note="blind: a pass")]) == [
        (Reason.BLIND, 2),
        (None, 1),
        (Reason.UNDEFINED, 1),
    ]


def test_a_parameter_after_the_step_is_part_of_the_update() -> None:
    """The start shows what was there before; what the step made of it stands with its change."""
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    heat_map = table.heat_map(
        [
            make_verdict(name, Kind.INITIAL),
            make_verdict(name, Kind.PARAM),
            make_verdict(name, Kind.PARAM_DELTA),
            make_verdict(name, Kind.PARAM, index=1, verdict=Outcome.DIVERGED),
        ]
    )
    cells = {
        (column.direction, column.kind): (group.total, group.failures)
        for (_, column), group in heat_map.cells.items()
    }
    assert cells == {
        (Direction.START, Kind.PARAM): (2, 0),
        (Direction.UPDATE, Kind.PARAM_DELTA): (2, 1),
    }


def test_a_metric_that_fails_in_one_step() -> None:
    """It has a cell of its own, whether the other step is before or after it."""
    outcomes = (Outcome.PASS, Outcome.DIVERGED)
    made = [make_verdict("lm loss", Kind.METRIC, verdict=outcome) for outcome in outcomes]
    for verdicts in (made, made[::-1]):
        cells = table.heat_map(verdicts).cells.items()
        failures = {column.tail: cell.failures for (_, column), cell in cells}
        assert failures == {"lm loss": 1, "metric": 0}
