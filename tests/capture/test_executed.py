# SPDX-License-Identifier: Apache-2.0
"""Changed functions are seen to run: before the model is built, in constructors, and in steps."""

import importlib.util
import sys

import pytest

from megatron_ttrace.capture.executed import ExecutedTap, Functions, changed, noting
from megatron_ttrace.jobs import edited
from megatron_ttrace.mcore import sources
from megatron_ttrace.mcore.names import Names
from megatron_ttrace.trace.collectives import Phase
from megatron_ttrace.trace.executed import Edit

SOURCE = """\
from torch import nn


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        mark()

    def forward(self, x):
        def inner():
            return x
        return inner()


def mark():
    pass


def setup():
    pass


def idle():
    pass
"""
FUNCTIONS = ("Layer.__init__", "Layer.forward", "mark", "setup", "idle", "")


@pytest.fixture
def layers(tmp_path, monkeypatch):
    """A module of a package that is taken for Megatron's."""
    file = tmp_path / "layers.py"
    file.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("ttrace_layers", file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "ttrace_layers", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(edited, "folders", lambda: {"megatron/core/": f"{tmp_path}/"})
    return module


@pytest.fixture
def tap(layers):
    """Records."""
    tap = ExecutedTap(edited.folders())
    tap.start()
    yield tap
    tap.stop()


def edits(*names, line=1):
    """Changes of the module."""
    return [Edit("megatron/core/layers.py", name, line) for name in names]


def names_of(layer):
    """The layer is one of a model."""
    names = object.__new__(Names)
    object.__setattr__(names, "modules", {"decoder.layers.3": layer})
    return [names]


def test_where_functions_run(layers, tap):
    """Each in its part of the job; helpers of a constructor in the module that is built."""
    layers.setup()
    tap.follow(edits(*FUNCTIONS))
    layer = layers.Layer()
    tap.in_steps(lambda: ("decoder.layers.3", Phase.FORWARD))
    layer(1)
    layer(1)
    tap.stop()
    layers.idle()
    found = {FUNCTIONS[one.edit]: (one.module, one.phase) for one in tap.executed(names_of(layer))}
    assert found == {
        "Layer.__init__": ("decoder.layers.*", Phase.CONSTRUCTION),
        "mark": ("decoder.layers.*", Phase.CONSTRUCTION),
        "Layer.forward": ("decoder.layers.*", Phase.FORWARD),
        "setup": ("", Phase.INITIALIZATION),
        "": ("", Phase.OTHER),
    }
    assert not tap.error


def test_a_file_of_which_anything_may_have_changed(layers, tap):
    """Any of its functions counts."""
    layers.setup()
    tap.follow(edits("", line=0))
    assert [one.phase for one in tap.executed([])] == [Phase.INITIALIZATION]


def test_nothing_was_changed(layers, tap):
    """Nothing is recorded any more."""
    tap.follow([])
    assert "ttrace changed code" not in map(sys.monitoring.get_tool, range(6))
    assert tap.executed([]) == ()


def test_an_error_of_ours_stays_ours(layers, tap):
    """It is noted, and the function runs."""
    layers.setup()
    tap.follow(edits("idle"))
    tap.in_steps(lambda: 1 / 0)
    layers.idle()
    assert "ZeroDivisionError" in tap.error


def test_no_room(layers, monkeypatch):
    """All places are taken by other tools."""
    monkeypatch.setattr(sys.monitoring, "get_tool", lambda tool: "other")
    tap = ExecutedTap(edited.folders())
    tap.start()
    assert tap.error


def test_nothing_seen(layers, tap):
    """Where no function was seen at all, what ran is not known."""
    tap.follow(edits("idle"))
    assert tap.error


def test_what_runs_in_a_context(layers) -> None:
    """Changed functions that run in it, and changed files of which any part runs."""
    functions: Functions = set()
    layers.idle()
    with noting(functions):
        layers.setup()
        layers.setup()
        layers.Layer()(1)
    layers.mark()
    file = sources.relative(layers.__file__)
    edits = [Edit(file, name, 7) for name in ("setup", "idle", "Layer.forward")]
    assert changed([*edits, Edit(file, "", 0), Edit("other.py", "setup", 1)], functions) == (
        f"{file}:7 (setup)",
        f"{file}:7 (Layer.forward)",
        file,
    )
