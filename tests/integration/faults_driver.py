# SPDX-License-Identifier: Apache-2.0
"""``python faults_driver.py JOBS``: train jobs, a JSON list of them, as forks of one process.

Prints one JSON object per job: the exit codes of its ranks, how long it took, and what they logged.
"""

import json
import sys
import time
from pathlib import Path

from megatron_ttrace.jobs import job as jobs
from megatron_ttrace.jobs.processes import ranks

if __name__ == "__main__":
    fork = jobs.prepare("cpu")
    for one in json.loads(Path(sys.argv[1]).read_text()):
        logs = Path(one["directory"]) / "logs"
        limit = time.monotonic() + one["limit"]

        def progress(limit=limit):
            """End a job that hangs."""
            if time.monotonic() > limit:
                raise TimeoutError

        began = time.monotonic()
        try:
            codes = ranks.run_ranks(
                one["nproc"],
                [sys.executable, one["script"], *one["arguments"]],
                logs,
                fork=fork,
                environment=one["environment"],
                progress=progress,
            )
        except TimeoutError:
            codes = ["hangs"]
        logged = [
            ranks.log_of(logs, rank).read_text(errors="replace") for rank in range(one["nproc"])
        ]
        took = time.monotonic() - began
        print(json.dumps({"codes": codes, "seconds": took, "logs": logged}), flush=True)
