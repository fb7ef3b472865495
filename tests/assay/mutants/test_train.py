# SPDX-License-Identifier: Apache-2.0
"""A mutant in this process, and in the ranks of a job."""

import dataclasses
import importlib
import sys
import textwrap

import pytest

from megatron_ttrace.trace.errors import TTraceError
from tests.assay.mutants import train
from tests.assay.mutants.scan import scan_source
from tests.assay.mutants.train import introduce

TEXT = textwrap.dedent(
    """
    def mean(total, world_size):
        é = total / world_size
        return é


    def unused():
        return 1
    """
)


@pytest.fixture
def module(tmp_path, monkeypatch):
    path = tmp_path / "mutated_here.py"
    path.write_text(TEXT)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("mutated_here")
    del sys.modules["mutated_here"]


def lost(text=TEXT):
    return next(m for m in scan_source("mutated_here", text) if m.operator == "lost-scale")


def test_introduce(module):
    """Who holds the function already runs the fault; putting its code back ends it."""
    held = module.mean
    ((function, code),) = introduce(lost())
    assert held(6, 2) == 6
    function.__code__ = code
    assert held(6, 2) == 3


def test_another_source(module):
    """Found in one Megatron, put into another: refused."""
    with pytest.raises(TTraceError, match="is not the file in which it was found"):
        introduce(lost(TEXT.replace("total /", "sum(total) /")))
    assert module.mean(6, 2) == 3


def test_as_text():
    """A mutant survives the way through the environment."""
    assert train.decode(train.encode(lost())) == lost()
    assert dataclasses.asdict(lost())["fragment"] == "total / world_size"
