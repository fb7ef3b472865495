# SPDX-License-Identifier: Apache-2.0
"""Other tools' rules on one known bug."""

import json
from pathlib import Path

from tests.integration.jobs import python


def test_one_bug(tmp_path: Path) -> None:
    """Bug 03 multiplies all gradients by the size of cp."""
    done = python(
        "-m", "tests.assay", "baselines", "03", "--json", cwd=tmp_path, timeout=280, cold=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["cases"] == ["03/fp32/0"]
    assert found["compared"] > 300
    [ours] = [line for line in found["rules"] if line["rule"] == "ttrace"]
    assert (ours["missed"], ours["unlocated"], ours["alarmed"]) == ([], [], [])
