# SPDX-License-Identifier: Apache-2.0
"""Places by hand: each exists in the installed Megatron, with its line."""

import importlib.util
import re
from pathlib import Path

import pytest

from megatron_ttrace.mcore.places import PLACES, by_hand
from megatron_ttrace.trace.findings import Cause, Finding


@pytest.mark.parametrize("cause", PLACES)
def test_place_exists(cause: Cause) -> None:
    """A place that Megatron lacks would send the reader on a wild goose chase."""
    function = PLACES[cause].partition(":")[2]
    found = re.fullmatch(r"megatron/(\S+):(\d+) \((\w+)\)", by_hand(Finding(cause)))
    assert found is not None
    assert found[3] == function
    package = importlib.util.find_spec("megatron.core")
    assert package is not None
    assert package.origin is not None
    source = (Path(package.origin).parents[1] / found[1]).read_text(encoding="utf-8")
    line = source.splitlines()[int(found[2]) - 1]
    assert re.match(rf"(def|class) {function}\b", line)


def test_no_place() -> None:
    """All other places are computed."""
    assert by_hand(None) == ""
    assert by_hand(Finding(Cause.PARTIAL, ("tp",))) == ""
