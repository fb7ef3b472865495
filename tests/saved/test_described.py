# SPDX-License-Identifier: Apache-2.0
"""Which code describes a parameter for checkpoints."""

import pytest

from megatron_ttrace.saved.described import describing

EXPERTS = "decoder.layers.1.mlp.experts"
MIXER = "decoder.layers.0.mixer"
PLACES = {
    "decoder": "block.py:1",
    "decoder.layers.0": "layer.py:1",
    "decoder.layers.1": "layer.py:1",
    MIXER: "mixer.py:1",
    f"{MIXER}.norm": "norm.py:1",
    EXPERTS: "experts.py:1",
    **{f"{EXPERTS}.{number}": "mlp.py:1" for number in range(2)},
    **{f"{EXPERTS}.{number}.fc1": "column.py:1" for number in range(2)},
    **{f"{EXPERTS}.{number}.fc2": "row.py:1" for number in range(2)},
}
COLUMNS = tuple(f"{EXPERTS}.{number}.fc1.weight" for number in range(2))
ROWS = tuple(f"{EXPERTS}.{number}.fc2.weight" for number in range(2))


@pytest.mark.parametrize(
    ("right", "place"),
    [
        ((), "column.py:1"),
        ((f"{MIXER}.out.weight",), "column.py:1"),
        # The same class describes others rightly: the mixer has divided this one.
        (("decoder.layers.1.mlp.fc1.weight",), "mixer.py:1"),
        (("decoder.layers.1.mlp.fc1.bias",), "column.py:1"),
        # Everything in the layer describes others rightly.
        (("decoder.layers.2.mixer.in.weight",), "column.py:1"),
    ],
)
def test_what_also_describes_right_ones(right: tuple[str, ...], place: str) -> None:
    """It is not to blame, but what is around it in the layer."""
    columns = f"{MIXER}.in", "decoder.layers.1.mlp.fc1", "decoder.layers.2.mixer.in"
    mixers = {"decoder.layers.2.mixer": "mixer.py:1", "decoder.layers.2": "layer.py:1"}
    places = {**PLACES, **mixers, **dict.fromkeys(columns, "column.py:1")}
    name = f"{MIXER}.in.weight"
    assert describing(places, name, [name], right) == place


@pytest.mark.parametrize(
    ("name", "wrong", "place"),
    [
        (f"{MIXER}.norm.weight", (), "norm.py:1"),
        (f"{MIXER}.conv.weight", (), "mixer.py:1"),  # torch's convolution describes nothing
        (COLUMNS[0], COLUMNS, "column.py:1"),
        (COLUMNS[0], (*COLUMNS, *ROWS), "experts.py:1"),
        (COLUMNS[0], (COLUMNS[0], ROWS[0]), "mlp.py:1"),
        (COLUMNS[0], (COLUMNS[0], f"{MIXER}.norm.weight"), "column.py:1"),
        ("embedding.weight", (), ""),
        ("embedding.weight", (*COLUMNS, *ROWS), ""),
    ],
)
def test_describing(name: str, wrong: tuple[str, ...], place: str) -> None:
    """The innermost module that describes it; of several in a layer, the one around them."""
    assert describing(PLACES, name, wrong) == place
