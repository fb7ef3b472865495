# SPDX-License-Identifier: Apache-2.0
"""Scanning: complete, with names that last; samples by a seed; mutants that are put in."""

import ast
import importlib
import sys
from collections import Counter

import pytest

from megatron_ttrace.mcore.versions import megatron_core_version, series
from megatron_ttrace.trace.changes import outermost
from megatron_ttrace.trace.errors import TTraceError
from tests.assay.mutants import campaign
from tests.assay.mutants.operators import OPERATORS
from tests.assay.mutants.scan import PACKAGES, introduce, modules, sample, scan, scan_source
from tests.assay.mutants.source import Source

# It reads all of Megatron.
pytestmark = pytest.mark.slow

MODULE = "megatron.core.tensor_parallel.made_up"
TEXT = """
import torch

torch.distributed.all_reduce(at_import)


class Layer:
    @decorate(size / world_size)
    def forward(self, x=a.clone()):
        def inner():
            torch.distributed.all_reduce(x)
        inner()
"""


@pytest.fixture(scope="module")
def found():
    return scan()


def test_every_package_and_operator(found):
    """Packages have at least sixty; the one single module has fewer. Ids are unique."""
    counts = Counter(mutant.package for mutant in found)
    assert set(counts) == {name.removeprefix("megatron.core.") for name in PACKAGES}
    assert counts.pop("transformer.transformer_layer") >= 15
    assert min(counts.values()) >= 60
    assert {mutant.operator for mutant in found} == set(OPERATORS)
    assert len({mutant.id for mutant in found}) == len(found)


def test_each_changes_one_function_and_stays_python(found):
    """Of one in thirty, for time's sake: the changed module parses, one function differs."""
    sources = {name: Source(name, path.read_text()) for name, path in modules()}
    dumps = {name: functions_of(source.tree) for name, source in sources.items()}
    for mutant in found[::30]:
        changed = sources[mutant.module].replace(mutant.span, mutant.replacement)
        before, after = dumps[mutant.module], functions_of(ast.parse(changed))
        assert [name for name in before if before[name] != after[name]] == [mutant.qualname], mutant


def test_explained_survivors_exist(found):
    """An explanation whose mutant is gone explains nothing."""
    if series(megatron_core_version()) != "0.19":
        pytest.skip("survivors.toml describes megatron-core 0.19")
    assert not campaign.survivors().keys() - {mutant.id for mutant in found}
    assert {sort for sort, _ in campaign.survivors().values()} == {"equivalent", "dormant"}


def functions_of(tree):
    """Name and text of every outermost function."""
    return {name: ast.dump(function) for name, function in outermost(tree)}


def test_only_what_runs_when_the_function_does():
    """Neither module level, nor decorators, nor defaults."""
    mutants = list(scan_source(MODULE, TEXT))
    assert {(mutant.qualname, mutant.span.first_line) for mutant in mutants} == {
        ("Layer.forward", 11)
    }
    operators = {mutant.operator for mutant in mutants}
    assert operators == {"drop-collective", "double-collective", "wrong-op"}


def test_ids_last():
    """Through new lines above and other line breaks; not through another statement."""
    ids = {mutant.id for mutant in scan_source(MODULE, TEXT)}
    broken = TEXT.replace("all_reduce(x)", "all_reduce(\n                x\n            )")
    assert {mutant.id for mutant in scan_source(MODULE, "# more\n" * 7 + broken)} == ids
    other = TEXT.replace("all_reduce(x)", "all_reduce(y)")
    assert not ids & {mutant.id for mutant in scan_source(MODULE, other)}
    call = "        torch.distributed.all_reduce(x)"
    twins = TEXT.replace("        inner()", f"        inner()\n{call}")
    assert len({mutant.id for mutant in scan_source(MODULE, twins)}) == 6


@pytest.mark.parametrize(
    ("text", "classes"),
    [
        # In the branch of the statement, but not in the whole function.
        (
            "def f(x, n):\n    if n:\n        scale = x / world_size\n        First.apply(scale)\n"
            "    Second.apply(x / world_size)\n    Third.apply(x)\n",
            [("First",), ("Second",)],
        ),
        # In the function that finds what the statement calls.
        (
            "def _find(config):\n    return Scaler.set_loss_scale if config.scaled else None\n"
            "def f(x, config):\n    function = _find(config)\n    function(x / world_size)\n"
            "    other(x / world_size)\n",
            [("Scaler",), ()],
        ),
    ],
)
def test_classes_near_a_statement(text, classes):
    """They tell where a number goes that a schedule hands to a class."""
    lost = [mutant for mutant in scan_source(MODULE, text) if mutant.operator == "lost-scale"]
    assert [mutant.classes for mutant in lost] == classes


def test_samples(found):
    """Chosen by the seed, in any order of the input; no stratum has two before each has one."""
    assert sample(found, 60, 1) == sample(reversed(found), 60, 1)
    assert sample(found, 60, 1) != sample(found, 60, 2)
    strata = Counter((mutant.package, mutant.operator) for mutant in found)
    dealt = Counter((mutant.package, mutant.operator) for mutant in sample(found, len(strata), 1))
    assert dealt == dict.fromkeys(strata, 1)
    assert {mutant.id for mutant in sample(found, 10**6, 1)} == {mutant.id for mutant in found}


def test_newcomers_move_nobody(found):
    """Within a stratum, the mutants that stay keep their order."""
    chosen = [
        mutant
        for mutant in found
        if (mutant.operator, mutant.package) == ("wrong-op", "distributed")
    ]
    order = sample(chosen, len(chosen), 1)
    order.remove(chosen[0])
    assert sample(chosen[1:], len(chosen), 1) == order


def test_introduce(tmp_path, monkeypatch):
    """Who holds the function already runs the fault; in other code it is refused."""
    text = "def mean(total, world_size):\n    é = total / world_size\n    return é\n"
    (tmp_path / "mutated_here.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    mean = importlib.import_module("mutated_here").mean
    try:
        (lost,) = (m for m in scan_source("mutated_here", text) if m.operator == "lost-scale")
        ((function, code),) = introduce(lost)
        assert mean(6, 2) == 6
        function.__code__ = code
        assert mean(6, 2) == 3
        other = text.replace("total /", "sum(total) /")
        (lost,) = (m for m in scan_source("mutated_here", other) if m.operator == "lost-scale")
        with pytest.raises(TTraceError, match="is not the file in which it was found"):
            introduce(lost)
    finally:
        del sys.modules["mutated_here"]
