# SPDX-License-Identifier: Apache-2.0
"""Growth of tolerances over depth, from movements made by hand; its figure and its command."""

import math
import xml.etree.ElementTree as ElementTree

import pytest

from megatron_ttrace import __main__
from megatron_ttrace.compare.tolerance import SAFETY, Moved, Tolerances
from megatron_ttrace.evaluation.growth import SERIES, growth, svg
from megatron_ttrace.trace.records import STEP_LEVEL, Kind, TraceKey

EPS = 2.0**-23


def grown(layers, forward=1.5, backward=2.0):
    """A model whose errors grow by these factors a layer."""
    moved = {}
    for layer in range(layers):
        name = f"decoder.layers.{layer}"
        depth = layers - 1 - layer
        for key, value in (
            (TraceKey(1, 0, Kind.OUTPUT, name), 1e-6 * forward**layer),
            (TraceKey(1, 0, Kind.OUTPUT, f"{name}.mlp"), 1.0),  # inside: not of the series
            (TraceKey(1, 0, Kind.GRAD_OUTPUT, name), 1e-6 * backward**depth),
            (TraceKey(1, STEP_LEVEL, Kind.MAIN_GRAD, f"{name}.w"), 1e-6 * backward**depth),
            (TraceKey(1, STEP_LEVEL, Kind.MAIN_GRAD, f"{name}.b"), 1e-6 * backward**depth),
        ):
            moved[key] = Moved(1000, 1.0, (value,))
    moved[TraceKey(1, 0, Kind.OUTPUT, "embedding")] = Moved(1000, 1.0, (1.0,))
    return growth(moved, Tolerances(moved, dict.fromkeys(moved, "float32")), layers, EPS)


def test_the_median_of_each_layer():
    """Gradients of the first layer are the deepest."""
    found = grown(4)
    assert found.by_layer["activations"][0] == pytest.approx(SAFETY * 1e-6)
    assert found.by_layer["weight gradients"][0] == pytest.approx(SAFETY * 8e-6)
    assert found.by_layer["activation gradients"][-1] == pytest.approx(SAFETY * 1e-6)


def test_rates():
    """The factor a layer, in the direction in which errors pile up."""
    found = grown(5)
    assert found.rate("activations") == pytest.approx(1.5)
    assert found.rate("weight gradients") == pytest.approx(2.0)
    assert math.isnan(grown(1).rate("activations"))


def test_the_bound():
    """k C^(L + 1 - l) epsilon."""
    assert grown(2).bound(4.0, 1.03) == pytest.approx((4 * 1.03**2 * EPS, 4 * 1.03 * EPS))


def test_a_layer_without_tensors_is_an_error():
    """A gap would shift all layers after it."""
    with pytest.raises(ValueError, match="some layer has no"):
        growth([], Tolerances({}, {}), 1, EPS)


def test_the_figure():
    """Well-formed, one line for each series and bound in each panel."""
    root = ElementTree.fromstring(svg([grown(1), grown(4), grown(16)], "a < b", (4.0, 1.03)))
    lines = root.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 3 * (len(SERIES) + 1)
    assert len(lines[-1].attrib["points"].split()) == 16


@pytest.mark.parametrize("layers", ["", "0", "4,x"])
def test_bad_depths(layers, capsys):
    """One line, exit code 2."""
    assert __main__.main(["growth", "--layers", layers]) == 2
    assert "give numbers from 1" in capsys.readouterr().err
