# SPDX-License-Identifier: Apache-2.0
"""``ttrace growth`` on real models."""

import json
from pathlib import Path

import pytest

from tests.integration.jobs import ttrace


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", [(), ("--bf16",)], ids=["fp32", "bf16"])
def test_depths(tmp_path: Path, dtype: tuple[str, ...]) -> None:
    """Errors grow with depth, by less than the theorem's 3 % a layer, and nothing gets blind."""
    done = ttrace(
        *("growth", "--layers", "4,16,64", "--json", "--svg", "growth.svg", *dtype),
        cwd=tmp_path,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    found = {one["layers"]: one for one in json.loads(done.stdout)}
    assert set(found) == {4, 16, 64}
    deepest = found[64]
    assert deepest["rates"]["activations"] > 1.0
    assert all(rate < 1.03 for rate in deepest["rates"].values())
    assert max(max(values) for values in deepest["tolerances"].values()) < 0.1
    assert (tmp_path / "growth.svg").stat().st_size < 20_000
