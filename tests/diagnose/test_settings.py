# SPDX-License-Identifier: Apache-2.0
"""Which number of a module is wrong, if the layout is not the reason."""

import pytest

from megatron_ttrace.diagnose import settings
from megatron_ttrace.trace.findings import Cause, OtherSetting

LAYERS = [f"decoder.layers.{number}.attention" for number in range(4)]
EVERY = "decoder.layers.*.attention"
EXPECTED = {name: {"layer_number": (number,)} for number, name in enumerate(LAYERS, 1)} | {
    EVERY: {"heads": (8.0,)},
}
WRONG = OtherSetting(
    cause=Cause.SETTING, module=LAYERS[3], attribute="layer_number", value=2, expected=4
)


@pytest.mark.parametrize(
    ("numbers", "setting"),
    [
        ([1, 2, 3, 4], None),
        ([1, 2, 3, 2], WRONG),
        # In no layer it is as on one device: the layout may be the reason.
        ([0, 0, 0, 2], None),
    ],
)
@pytest.mark.parametrize("culprit", [LAYERS[3], "decoder.layers.3"])
def test_a_number_of_one_layer(numbers, setting, culprit) -> None:
    """It is right in another layer; heads are divided among ranks everywhere."""
    ours = {name: {"layer_number": (number,)} for name, number in zip(LAYERS, numbers, strict=True)}
    ours[EVERY] = {"heads": (4.0,)}
    assert settings.differing(culprit, ours, EXPECTED) == setting
    assert settings.differing(LAYERS[0], ours, EXPECTED) is None


def test_a_stage_of_one_layer() -> None:
    """It has one value for all of its layers, beside the one of the other stage."""
    ours = {LAYERS[0]: {"layer_number": (1,)}, EVERY: {"layer_number": (2,)}}
    assert settings.differing(LAYERS[3], ours, EXPECTED) == WRONG
    assert settings.differing(LAYERS[3], {}, EXPECTED) is None
