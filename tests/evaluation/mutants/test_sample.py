# SPDX-License-Identifier: Apache-2.0
"""A sample is the same every time, and has some of everything."""

from collections import Counter

import pytest

from megatron_ttrace.evaluation.mutants.sample import sample
from megatron_ttrace.evaluation.mutants.scan import scan


@pytest.fixture(scope="module")
def found():
    return scan()


def strata(mutants):
    return Counter((mutant.package, mutant.operator) for mutant in mutants)


def test_repeats(found):
    assert sample(found, 60, 1) == sample(reversed(found), 60, 1)
    assert sample(found, 60, 1) != sample(found, 60, 2)


def test_some_of_everything(found):
    """No stratum has two before each has one."""
    everything = strata(found)
    dealt = strata(sample(found, len(everything), 1))
    assert set(dealt) == set(everything)
    assert set(dealt.values()) == {1}


def test_all(found):
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
