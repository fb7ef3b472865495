# SPDX-License-Identifier: Apache-2.0
"""The transport for several ranks on one GPU, on a machine without one: CPU tensors are staged."""

from concurrent.futures import ThreadPoolExecutor

from tests.integration.jobs import ROOT, python


def test_every_collective(tmp_path):
    """Values, in-place use, tensors that are not contiguous, transfers in both directions."""

    def run(rank):
        words = "-m", "tests.gpu.transport_ranks", f"file://{tmp_path}/store", rank, 2
        return python(*words, cwd=ROOT, timeout=600)

    with ThreadPoolExecutor() as pool:
        for done in pool.map(run, range(2)):
            assert done.returncode == 0, done.stderr
