# SPDX-License-Identifier: Apache-2.0
"""What a night's exit code says."""

import pytest

from megatron_ttrace.evaluation.nightly.records import Gap, Night, NightPart, State
from tests.evaluation.nightly.synthetic import case, night

SWITCHED_OFF = Gap(NightPart.RECIPES, "switched off", by_choice=True)


@pytest.mark.parametrize(
    ("tonight", "code"),
    [
        (night(), 0),
        (night(gaps=(SWITCHED_OFF,)), 0),
        (night(case(state=State.MISSED)), 2),
        (night(case(NightPart.MATRIX, state=State.ALARM)), 1),
        (night(case(state=State.MISSED), case(NightPart.MATRIX, state=State.ALARM)), 1),
        (night(case(state=State.BROKEN), case(state=State.MISSED)), 2),
        (night(case(state=State.BROKEN)), 2),
        (night(gaps=(Gap(NightPart.MATRIX, "was killed"),)), 2),
    ],
)
def test_exit_code(tonight: Night, code: int) -> None:
    """A false alarm outweighs the rest; a part that was switched off is not a gap."""
    assert tonight.exit_code == code
    assert tonight.is_good == (code == 0)


def test_a_night_of_nothing_is_not_good() -> None:
    """Where nothing ran, nothing was seen."""
    empty = Night("", 0.0, {}, {}, ())
    assert empty.exit_code == 2
