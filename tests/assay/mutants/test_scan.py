# SPDX-License-Identifier: Apache-2.0
"""Scanning: pure, complete, with names that last."""

import ast
import subprocess
import sys
from collections import Counter

import pytest

from megatron_ttrace.evaluation.bugs.patching import functions
from megatron_ttrace.mcore.versions import megatron_core_version, series
from tests.assay.mutants import survivors
from tests.assay.mutants.operators import OPERATORS
from tests.assay.mutants.scan import (
    PACKAGES,
    autograd_files,
    modules,
    sample,
    scan,
    scan_source,
)
from tests.assay.mutants.source import Source

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
    """Packages have at least sixty; the one single module has fewer."""
    counts = Counter(mutant.package for mutant in found)
    assert set(counts) == {name.removeprefix("megatron.core.") for name in PACKAGES}
    assert counts.pop("transformer.transformer_layer") >= 15
    assert min(counts.values()) >= 60
    assert {mutant.operator for mutant in found} == set(OPERATORS)


def test_ids_are_unique(found):
    """No two mutants have the same id."""
    assert len({mutant.id for mutant in found}) == len(found)


def test_each_changes_one_function_and_stays_python(found):
    """Of one in thirty, for time's sake: the changed module parses, one function differs."""
    sources = {name: Source(name, path.read_text()) for name, path in modules()}
    dumps = {name: functions_of(source.tree) for name, source in sources.items()}
    for mutant in found[::30]:
        changed = sources[mutant.module].replace(mutant.span, mutant.replacement)
        before, after = dumps[mutant.module], functions_of(ast.parse(changed))
        assert [name for name in before if before[name] != after[name]] == [mutant.qualname], mutant


def functions_of(tree):
    """Name and text of every outermost function."""
    return {name: ast.dump(function) for name, function in functions(tree)}


def test_only_what_runs_when_the_function_does():
    """Neither module level, nor decorators, nor defaults."""
    found = list(scan_source(MODULE, TEXT))
    assert {mutant.qualname for mutant in found} == {"Layer.forward"}
    assert {mutant.lines.start for mutant in found} == {11}
    assert {mutant.operator for mutant in found} == {
        "drop-collective",
        "double-collective",
        "wrong-op",
    }


def test_ids_last():
    """Through new lines above and other line breaks; not through another statement."""
    ids = {mutant.id for mutant in scan_source(MODULE, TEXT)}
    moved = "# more\n" * 7 + TEXT.replace(
        "all_reduce(x)", "all_reduce(\n                x\n            )"
    )
    assert {mutant.id for mutant in scan_source(MODULE, moved)} == ids
    other = TEXT.replace("all_reduce(x)", "all_reduce(y)")
    assert not ids & {mutant.id for mutant in scan_source(MODULE, other)}


def test_classes_near_a_statement():
    """In it, and in the branch that it is in, but not in the whole function."""
    text = """
def f(x, n):
    if n:
        scale = x / world_size
        First.apply(scale)
    Second.apply(x / world_size)
    Third.apply(x)
"""
    found = [m for m in scan_source(MODULE, text) if m.operator == "lost-scale"]
    assert [m.classes for m in found] == [("First",), ("Second",)]


def test_classes_behind_a_name():
    """In the function that finds what the statement calls."""
    text = """
def _find(config):
    from other import Scaler
    return Scaler.set_loss_scale if config.scaled else None

def f(x, config):
    function = _find(config)
    function(x / world_size)
    other(x / world_size)
"""
    found = [m for m in scan_source(MODULE, text) if m.operator == "lost-scale"]
    assert [m.classes for m in found] == [("Scaler",), ()]


def test_autograd_functions_are_watched_anywhere():
    """Schedules hand scales to classes of files that are not scanned."""
    watched = {path.name for path in autograd_files()}
    assert {"multi_token_prediction.py", "dsa.py", "mappings.py"} <= watched


def test_twins_have_their_own_ids():
    """The same statement twice in one function."""
    twice = TEXT.replace(
        "        inner()", "        inner()\n        torch.distributed.all_reduce(x)"
    )
    assert len({mutant.id for mutant in scan_source(MODULE, twice)}) == 6


def test_nothing_heavy_is_imported():
    """Listing needs neither torch nor Megatron."""
    program = (
        "import sys; from tests.assay.mutants.scan import scan\n"
        "assert scan(['tensor_parallel.mappings:*'])\n"
        "print([name for name in ('torch', 'megatron.core') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]"


def test_explained_survivors_exist(found):
    """An explanation whose mutant is gone explains nothing."""
    if series(megatron_core_version()) != "0.19":
        pytest.skip("survivors.toml describes megatron-core 0.19")
    ids = {mutant.id for mutant in found}
    explained = [name for survivor in survivors.load() for name in survivor.ids]
    assert not set(explained) - ids
    assert len(set(explained)) == len(explained)


def test_modules_are_the_ones_in_use():
    """A package's own file is the package: imported as ``.__init__`` it would be a second one."""
    names = [name for name, _ in modules()]
    assert "megatron.core.optimizer" in names
    assert not [name for name in names if name.endswith("__init__")]


def strata(mutants):
    return Counter((mutant.package, mutant.operator) for mutant in mutants)


def test_repeats(found):
    """The same seed gives the same sample, in any order of the input."""
    assert sample(found, 60, 1) == sample(reversed(found), 60, 1)
    assert sample(found, 60, 1) != sample(found, 60, 2)


def test_some_of_everything(found):
    """No stratum has two before each has one."""
    everything = strata(found)
    dealt = strata(sample(found, len(everything), 1))
    assert set(dealt) == set(everything)
    assert set(dealt.values()) == {1}


def test_all(found):
    """A sample that is large enough has all mutants."""
    assert sorted(mutant.id for mutant in sample(found, 10**6, 1)) == sorted(
        mutant.id for mutant in found
    )


def test_newcomers_move_nobody(found):
    """Within a stratum, the mutants that stay keep their order."""
    chosen = [mutant for mutant in found if mutant.operator == "wrong-op"]
    order = sample(chosen, len(chosen), 1)
    fewer = sample(chosen[1:], len(chosen), 1)
    one = [mutant for mutant in order if mutant.package == "distributed" and mutant != chosen[0]]
    assert [mutant for mutant in fewer if mutant.package == "distributed"] == one
