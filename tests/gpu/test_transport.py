# SPDX-License-Identifier: Apache-2.0
"""The transport for several ranks on one GPU, on a machine without one: CPU tensors are staged."""

import subprocess
import sys

from tests.integration.jobs import ROOT, environment


def test_every_collective(tmp_path):
    """Values, in-place use, tensors that are not contiguous, transfers in both directions."""
    ranks = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.gpu.transport_ranks"),
                *(f"file://{tmp_path}/store", str(rank), "2"),
            ],
            cwd=ROOT,
            env=environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        _, told = rank.communicate(timeout=120)
        assert rank.returncode == 0, told
