# SPDX-License-Identifier: Apache-2.0
"""Geometry of the figures: colours, frames, panels on lines, curves, ranks."""

import dataclasses
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.report import figures, table
from megatron_ttrace.trace.records import Kind, Outcome, Verdict
from tests.report.expected import Check
from tests.report.synthetic_report import make_verdict


@pytest.mark.parametrize(
    ("outcome", "rel_err", "expected"),
    [
        (Outcome.PASS, 0.0, 0),
        (Outcome.PASS, 0.05, 1),
        (Outcome.PASS, 0.5, 2),
        (Outcome.PASS, 1.0, 3),
        (Outcome.PASS, None, 0),
        (Outcome.DIVERGED, 1.5, 4),
        (Outcome.REPLICA_CONFLICT, 0.1, 4),
        (Outcome.DIVERGED, 10.0, 5),
        (Outcome.DIVERGED, 99.0, 6),
        (Outcome.DIVERGED, float("inf"), 7),
        (Outcome.NONFINITE, float("nan"), figures.UNMEASURED),
        (Outcome.MISSING, None, figures.UNMEASURED),
        (Outcome.UNCHECKED, 5.0, figures.UNCHECKED),
    ],
)
def test_colours(outcome: Outcome, rel_err: float | None, expected: int) -> None:
    """A failure never has the colour of a pass, whatever its margin."""
    verdict = make_verdict(verdict=outcome, rel_err=rel_err, tolerance=1.0)
    assert figures.colour_class(verdict) == expected


def test_a_culprit_has_one_frame() -> None:
    """Around weight and bias, but not around what lies between two culprits; folded rows too."""
    names = [f"decoder.layers.{n}.{m}" for n in range(3) for m in ("a.weight", "a.bias", "b.bias")]
    verdicts = [make_verdict(name, Kind.MAIN_GRAD, verdict=Outcome.DIVERGED) for name in names]
    heat_map = table.heat_map(verdicts)
    places = {verdict.name: place for verdict, place in zip(verdicts, heat_map.places, strict=True)}
    culprits = [
        {places[f"decoder.layers.{n}.a.weight"], places[f"decoder.layers.{n}.a.bias"]}
        for n in range(3)
    ]
    figure = figures.heat_map_figure(heat_map, culprits)
    folded, unfolded = figure.maps
    (panel,) = unfolded.panels
    assert [width for _, _, width in panel.origins] == [2 * figure.pitch] * 3
    assert len({y for _, y, _ in panel.origins}) == 3
    assert [width for _, _, width in folded.panels[0].origins] == [2 * figure.pitch]
    assert [(text, several) for _, text, several in folded.rows] == [("decoder.layers.0-2", True)]
    assert figure.folded == 3


def curves_of(verdicts: list[Verdict]) -> list[figures.Curve]:
    """The curves of a check."""
    return figures.curves(verdicts, table.heat_map(verdicts))


def ranks_of(rank_map: figures.RankMap) -> list[figures.RankCell]:
    """All ranks, row by row."""
    return [cell for _, stages in rank_map.rows for stage in stages for cell in stage]


def test_curves_run_from_embedding_to_output(diverged: Check) -> None:
    """All four directions, one x axis: the depth of the model."""
    curves = curves_of(diverged[1])
    directions = "forward backward gradient update".split()
    assert [curve.title.split(":")[0] for curve in curves] == directions
    for curve in curves:
        labels = [band[4] for band in curve.bands if band[4]]
        assert labels[:5] == ["embedding", "0", "1", "2", "3"]
        places = [point[0] for point in curve.points]
        assert places == sorted(places)
        assert all(
            0 <= x <= figures.CURVE_WIDTH and 0 <= y <= figures.CURVE_HEIGHT
            for x, y, *_ in curve.points
        )


def test_curves_survive_extremes() -> None:
    """Zeros, infinities, and thousands of modules."""
    verdicts = [
        make_verdict(f"decoder.layers.{i // 50}.m{i}", rel_err=error, tolerance=tolerance)
        for i, (error, tolerance) in enumerate(
            [(0.0, 1e-300), (float("inf"), 1e300), (float("nan"), None), (1e-3, 0.0)] * 500
        )
    ]
    (curve,) = curves_of(verdicts)
    assert len(curve.points) <= 300
    assert curves_of([make_verdict(rel_err=0.0, tolerance=0.0)]) == []


@pytest.mark.parametrize(
    ("config", "place"),
    [
        ({"tp": 2, "pp": 2, "dp": 1, "world_size": 4}, {3: "tp 1, cp 0, dp 0, pp 1"}),
        ({"tp": 2, "cp": 2, "pp": 2, "dp": 2, "world_size": 16}, {13: "tp 1, cp 0, dp 1, pp 1"}),
        ({"tp": "2", "world_size": 8}, {6: "tp 0, cp 0, dp 3, pp 0"}),
        ({"world_size": 1}, None),
        ({"tp": 3, "world_size": 4}, None),
        ({"tp": 2, "dp": 5, "world_size": 4}, None),
        ({"tp": [], "world_size": None}, None),
        ({"tp": 8, "dp": 2048, "world_size": 16384}, None),
        ({"tp": -2, "world_size": 4}, None),
    ],
)
def test_rank_layout(config: dict, place: dict[int, str] | None) -> None:
    """Ranks lie where Megatron puts them; what cannot be drawn is left out."""
    rank_map = figures.rank_map(config, [], [])
    if place is None:
        assert rank_map is None
        return
    assert rank_map is not None
    cells = {cell.rank: cell for cell in ranks_of(rank_map)}
    assert sorted(cells) == list(range(int(config["world_size"])))
    for rank, words in place.items():
        assert words in cells[rank].title


def test_failing_ranks_are_marked(diverged: Check) -> None:
    """Ranks of the culprit and of other failures stand out."""
    conflict = dataclasses.replace(diverged[1][-1], ranks=(0,))
    rank_map = figures.rank_map(diverged[0].config, [*diverged[1], conflict], [1, 3])
    assert rank_map is not None
    assert [cell.state for cell in ranks_of(rank_map)] == ["failing", "culprit", "fine", "culprit"]


@pytest.mark.parametrize(
    ("widths", "expected"),
    [
        ([], []),
        ([300], [(410, "1")]),
        ([300, 300, 100], [(410, "111"), (520, "110"), (830, "100")]),
        ([100, 900, 100], [(1010, "111"), (1120, "110"), (1230, "100")]),
        # A third line would not make the page narrower.
        ([900, 8, 8], [(1010, "110"), (1046, "100")]),
    ],
)
def test_arrangements_by_hand(widths: list[int], expected: list[tuple[int, str]]) -> None:
    """Labels of 90 pixels, gaps of 10."""
    shown = [
        (arrangement.width, "".join("01"[start] for start in arrangement.starts))
        for arrangement in figures.arrangements(widths, 90, 10)
    ]
    assert shown == expected


@given(st.lists(st.integers(8, 900), min_size=1, max_size=5))
def test_every_width_has_its_lines(widths: list[int]) -> None:
    """Narrowest first, fewer lines the wider, one line last, and every line within the width."""
    arrangements = figures.arrangements(widths, 160, 14)
    assert arrangements[-1].starts == (True,) + (False,) * (len(widths) - 1)
    assert arrangements[0].width == 160 + 14 + max(widths) + 14
    for arrangement in arrangements:
        line = 0
        for width, starts in zip(widths, arrangement.starts, strict=True):
            line = 160 + 14 if starts else line
            line += width + 14
            assert line <= arrangement.width
    for narrow, wide in pairwise(arrangements):
        assert narrow.width < wide.width
        assert sum(narrow.starts) > sum(wide.starts)
