# SPDX-License-Identifier: Apache-2.0
"""Planted errors under other tools' rules: what each must and cannot see."""

import json

from tests.assay import __main__
from tests.assay.baselines.planted import columns
from tests.assay.baselines.tally import OURS
from tests.assay.planting import Field
from tests.assay.test_planting import saved  # noqa: F401 - a fixture


def test_shares(saved):  # noqa: F811
    """Nothing planted: nobody flags. Quadratic rules see large errors only; ours from 2 %."""
    field = Field(*saved)
    found = {column.sort: column.found for column in columns(field, 20)}
    assert set(found["0"].values()) == {0.0}
    assert found["0.01"]["sglang rel_diff 1e-3"] == 0.0
    assert found["0.04"]["sglang rel_diff 1e-3"] == 0.0
    assert found["0.5"]["sglang rel_diff 1e-3"] == 1.0
    assert found["0.01"][OURS] == 0.0
    assert found["0.04"][OURS] == found["0.5"][OURS] == 1.0


def test_the_command(saved, capsys):  # noqa: F811
    """As a table and as JSON."""
    words = ["baselines", "--planted", *map(str, saved), "--trials", "2"]
    assert __main__.main(words) == 0
    assert "| ttrace | 0% |" in capsys.readouterr().out
    assert __main__.main([*words, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 10
    assert __main__.main([*words[:-1], "0"]) == 2
