# SPDX-License-Identifier: Apache-2.0
"""What functions were given and returned, by norms."""

import math
from types import SimpleNamespace

import pytest

from megatron_ttrace.compare.norms import FILE, agreements, read_calls, write_calls
from megatron_ttrace.trace.collectives import Agreement, CallNorms, Norm, Phase
from megatron_ttrace.trace.errors import TTraceError

ALIKE, STRAYS, GIVEN_OTHER = Agreement.ALIKE, Agreement.STRAYS, Agreement.GIVEN_OTHER
GIVEN = (8, 4.0)
F, B = Phase.FORWARD, Phase.BACKWARD


def call(
    *returned: tuple[int, float],
    given: tuple[tuple[int, float], ...] = (GIVEN,),
    phase: Phase = F,
    module: str = "layers.1.mlp",
) -> CallNorms:
    """Of one function."""
    norms = (tuple(Norm(*norm) for norm in norms) for norms in (given, returned))
    return CallNorms("m.py:1 (f)", module, phase, *norms)


def agreement(
    reference: CallNorms,
    *ranks: CallNorms,
    sizes: tuple[int, ...] = (2, 1),
    stages: tuple[int, ...] = (0, 0),
    factor: float = 1.0,
) -> Agreement | None:
    """Of the only call."""
    calls = [(stage, [own]) for stage, own in zip(stages, ranks, strict=False)]
    compared = agreements(calls, [reference], sizes, factor)
    assert all((c.function, c.module) == ("m.py:1 (f)", "layers.*.mlp") for c in compared)
    return compared[0].agreement if compared else None


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([(8, 5.0), (8, 5.0)], ALIKE),
        ([(8, 5.05), (8, 5.0)], ALIKE),
        ([(8, 10.0), (8, 5.0)], STRAYS),
        ([(8, 0.0), (8, 0.0)], STRAYS),
        ([(8, math.nan), (8, 5.0)], STRAYS),
        # Parts, of whatever sizes, whose squares add up; and not.
        ([(4, 3.0), (4, 4.0)], ALIKE),
        ([(4, 3.0), (4, 3.0)], STRAYS),
        # They may be summands.
        ([(8, 3.0), (8, 3.5)], None),
        # Not as many elements on all ranks, or no even part.
        ([(4, 3.0), (8, 4.0)], None),
        ([(3, 9.0), (3, 9.0)], None),
        ([(16, 5.0), (16, 5.0)], None),
    ],
)
def test_results(ranks, expected):
    """What they are on two tensor-parallel ranks."""
    assert agreement(call((8, 5.0)), *(call(norm) for norm in ranks)) is expected


def test_what_one_axis_divides_may_be_a_summand_over_another():
    """Of parts over both axes that is out of the question."""
    ranks = [call((4, 1.0))] * 4
    assert agreement(call((8, 2.0)), *ranks, sizes=(2, 2), stages=(0,) * 4) is None
    ranks = [call((2, 0.5))] * 4
    assert agreement(call((8, 2.0)), *ranks, sizes=(2, 2), stages=(0,) * 4) is STRAYS


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (((8, 4.0), (8, 9.0)), GIVEN_OTHER),
        (((8, 4.0), (8, 0.8)), STRAYS),
        (((8, 3.0), (8, 0.8)), Agreement.RETURNED_OTHER),
        ((), Agreement.RETURNED_OTHER),
    ],
)
def test_what_was_given_comes_first(given, expected):
    """If that is wrong, or nothing of it is known, a wrong result says less."""
    theirs = call((8, 5.0), given=((8, 4.0), (8, 1.0)) if given else ())
    wrong = call((8, 50.0), given=given)
    assert agreement(theirs, wrong, wrong) is expected


@pytest.mark.parametrize(("phase", "expected"), [(B, ALIKE), (F, STRAYS)])
def test_gradients_have_a_factor(phase, expected):
    """What is saved for the backward pass has none."""
    theirs = call((8, 5.0), (8, 1.0), phase=phase)
    assert agreement(theirs, call((8, 10.0), (8, 1.0), phase=phase), factor=2.0) is expected


def test_a_module_on_two_stages():
    """The first call on the second one is another one than the reference's first."""
    ranks = call((8, 50.0)), call((8, 50.0))
    assert agreement(call((8, 5.0)), *ranks, stages=(0, 1)) is None
    assert agreement(call((8, 5.0)), *ranks) is STRAYS


def test_other_calls():
    """Of another module, or with other arguments."""
    ours = call((8, 5.0), module="layers.2.mlp")
    assert agreement(call((8, 5.0)), ours) is None
    assert agreement(call((8, 5.0)), call((8, 5.0), (8, 5.0))) is None


def test_numbers():
    """Of a loss's scale, whoever set it is wrong; what returns it is not right either."""
    assert agreement(call((1, 5.0)), call((1, 50.0))) is None
    assert agreement(call((1, 5.0)), call((1, 5.0))) is ALIKE


@pytest.mark.parametrize("damage", ["", "other", "cut", "no JSON", "no call", "absent"])
def test_a_references_calls(damage, tmp_path):
    """Those that are wanted; without them there are fewer places, and no more."""
    calls = [call((8, 5.0)), call((8, math.inf), module="layers.2.mlp")]
    write_calls(tmp_path, calls)
    lines = {"cut": "{", "no JSON": "x\n", "no call": '{"function": 1}\n'}
    with (tmp_path / FILE).open("a") as file:
        file.write(lines.get(damage, ""))

    def verify(name):
        if damage == "other":
            raise TTraceError(name)

    reference = SimpleNamespace(directory=tmp_path, verify=verify)
    if damage == "absent":
        (tmp_path / FILE).unlink()
    wanted = {("m.py:1 (f)", "layers.2.mlp")}
    assert read_calls(reference, wanted) == calls[1:] * (damage not in ("other", "absent"))


def test_no_number_in_the_reference():
    """Nothing follows from it."""
    assert agreement(call((8, math.inf)), call((8, 5.0))) is None
