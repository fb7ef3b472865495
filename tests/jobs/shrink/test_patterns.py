# SPDX-License-Identifier: Apache-2.0
"""Patterns over layers and stages become shorter and keep what differs in them."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.jobs.shrink import patterns

LISTS = st.lists(st.integers(0, 1), min_size=1, max_size=60)


def runs(pattern):
    """Its different neighbours."""
    return [value for value, _ in itertools.groupby(pattern)]


@given(LISTS)
def test_round_trip(pattern):
    """What is written is read."""
    assert patterns.layers(patterns.write_layers(pattern)) == pattern


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("([0]*3+[1]*2)", [0, 0, 0, 1, 1]),
        ("([0]*1+[1]*1)*2", [0, 1, 0, 1]),
        ("[0, 1]", [0, 1]),
        ("([0]+[1]*2)*2", [0, 1, 1, 0, 1, 1]),
        ("3", None),
        ("", None),
        ("[0]*", None),
        ("([0]", None),
        ("__import__('os')", None),
        ("[0]*999999999", None),
        ("[1]*-1", None),
        ("[[0]]", None),
    ],
)
def test_megatrons_notation(text, pattern):
    """As its parser evaluates it; nothing is evaluated here."""
    assert patterns.layers(text) == pattern


@given(st.text())
def test_any_text(text):
    patterns.layers(text)
    patterns.stages(text[:20].replace("*", ""))


@given(LISTS, st.integers(1, 12))
def test_compressed(pattern, length):
    """The same order of kinds, as far as they fit, in so many layers."""
    short = patterns.compress(pattern, length)
    assert len(short) == max(length, 1)
    assert runs(short) == runs(pattern)[:length]


def test_shares():
    """A long run stays longer than a short one."""
    assert patterns.compress([0] * 3 + [1] * 11, 4) == [0, 1, 1, 1]
    assert patterns.compress([1] * 20, 2) == [1, 1]


def test_stages():
    """Megatron's own examples."""
    assert patterns.stages("Ettt|(tt|)*3,m|L") == ["Ettt", "tt", "tt", "tt", "m", "L"]
    assert patterns.stages("Et*3|(tt|)*2tmL") == ["Ettt", "tt", "tt", "tmL"]
    assert patterns.stages("EtL") == ["EtL"]


@pytest.mark.parametrize(
    ("layout", "count", "short"),
    [
        ("Et*3|(tt|)*6tmL", 2, ["Ett", "tmL"]),
        ("Et*3|(tt|)*6tmL", 4, ["Ettt", "tt", "tt", "tmL"]),
        ("Et*7|t*7mL", 2, ["Et", "tmL"]),
        ("Et|t|ttt|tL", 4, ["Et", "t", "tt", "tL"]),
        ("Ett|L", 2, ["Et", "L"]),
    ],
)
def test_fewer_stages(layout, count, short):
    """The ends stay, and which stage has more layers than another."""
    assert patterns.shrink_stages(patterns.stages(layout), count) == short


@pytest.mark.parametrize(
    ("pattern", "count", "short"),
    [
        ("M-M-M-M*-M-", 1, "M-*"),
        ("M-M-M-M*-M-", 2, "M-*M-*"),
        ("M-M-|M*-M-", 2, "M-|M*-"),
        ("MEME*|ME*|M-/MM/MM", 2, "ME*|M-/M/M"),
        ("M-M|M*", 1, "M-*"),
    ],
)
def test_hybrid(pattern, count, short):
    """Every kind of layer of a segment stays."""
    assert patterns.shrink_hybrid(pattern, count) == short


@pytest.mark.parametrize(
    ("pattern", "count", "short"),
    [("M" * 64, 1, "MMM"), ("M" * 64, 2, "MMMM"), ("M-M*", 1, "M-*M-*"), ("M-|M-", 2, "M-|M-")],
)
def test_hybrid_with_ends_of_another_precision(pattern, count, short):
    """Between them there is a layer of every kind."""
    assert patterns.shrink_hybrid(pattern, count, 1, 1) == short
