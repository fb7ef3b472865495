# SPDX-License-Identifier: Apache-2.0
"""Lists of known differences."""

import pytest

from megatron_ttrace.saved import known
from megatron_ttrace.saved.known import Difference
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.records import Kind, TraceKey

TABLE = """\
[[difference]]
name = "decoder.layers.*.router"
kinds = ["metric"]
between = ["0.18", "0.19"]
reason = "counted per layer since 0.19"
"""


def test_our_own_list_is_valid():
    """And gives a reason for each."""
    assert all(difference.reason for difference in known.read(known.OWN_LIST))


def test_a_table(tmp_path):
    """Names are patterns, kinds are exact, versions are in any order and may be longer."""
    file = tmp_path / "known.toml"
    file.write_text(TABLE)
    (difference,) = known.read(file)
    assert difference.applies(("0.19.2", "0.18.2"))
    assert difference.applies(("0.18.2+abc", "0.19"))
    assert not difference.applies(("0.18.2", "0.18.2"))
    assert not difference.applies(("0.18.2", "0.190.1"))
    assert difference.explains(TraceKey(1, 0, Kind.METRIC, "decoder.layers.3.router"))
    assert not difference.explains(TraceKey(1, 0, Kind.OUTPUT, "decoder.layers.3.router"))
    assert not difference.explains(TraceKey(1, 0, Kind.METRIC, "decoder.layers.3.mlp"))


def test_any_two_runs():
    """Without versions and kinds, a name is enough."""
    difference = Difference("*", "wanted")
    assert difference.applies(("", ""))
    assert difference.explains(TraceKey(1, 0, Kind.OUTPUT, "a"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "not a list of known differences"),
        ("[[difference]", "not a list of known differences"),
        ('[[difference]]\nname = "a"\n', "reason: is missing"),
        ('[[difference]]\nname = "a"\nreason = " "\n', "give a name and a reason"),
        ('[[difference]]\nname = "a"\nreason = "b"\nkind = "x"\n', "'kind' is not a field"),
        ('[[difference]]\nname = "a"\nreason = "b"\nbetween = ["0.18"]\n', "give two versions"),
        ('[[difference]]\nname = "a"\nreason = "b"\nkinds = ["x"]\n', "kinds"),
        ("difference = 1\n", "difference"),
        ("x = " + "[" * 50_000, "nested too deeply"),
        ("[differences]\n", "'differences' is not a field"),
    ],
)
def test_bad_lists(tmp_path, text, message):
    """A slip, or an absent file, must not be taken for a list that explains nothing."""
    file = tmp_path / "known.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(TTraceError, match=r"known\.toml") as error:
        known.read(file)
    assert message in str(error.value)
