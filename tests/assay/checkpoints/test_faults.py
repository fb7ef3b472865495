# SPDX-License-Identifier: Apache-2.0
"""The sample of faults."""

from itertools import islice

from tests.assay.checkpoints.faults import sample
from tests.assay.planted.checkpoint_faults import MECHANISMS, Side
from tests.assay.planted.checkpoints import Fault

_ROUND = len(MECHANISMS)


def test_a_seed_is_a_sample():
    """The same again with the same seed, another one with another."""
    one, again, other = (list(islice(sample(seed), 30)) for seed in (3, 3, 4))
    assert one == again != other


def test_every_mechanism_is_in_a_round():
    """Each round has all of them once, in jobs that have what they need."""
    drawn = list(islice(sample(5), 2 * _ROUND))
    for part in (drawn[:_ROUND], drawn[_ROUND:]):
        assert sorted(planted.fault.mechanism for planted in part) == sorted(MECHANISMS)
    for planted in drawn:
        kind = MECHANISMS[planted.fault.mechanism]
        assert kind.needs <= planted.job.words
        assert planted.fault.side in kind.sides
        assert planted.into in (*planted.job.into, planted.job.layout)
        assert not kind.describes or planted.into != planted.job.layout


def test_an_order_is_read_back():
    """What the environment variable holds."""
    fault = Fault(Side.LOAD, "lost_moment", 7)
    assert Fault.of(fault.order) == fault
    assert fault.order.startswith("{")
