# SPDX-License-Identifier: Apache-2.0
"""``python driver.py JOBS``: run checks, a JSON list of them, as forks of one process.

Ranks are forks, so Megatron is imported once for all checks. Prints one JSON object a check.
"""

import json
import sys
from pathlib import Path

from megatron_ttrace.jobs import job as jobs
from megatron_ttrace.jobs.settings import Settings, split
from megatron_ttrace.trace.errors import TTraceError

if __name__ == "__main__":
    fork = jobs.prepare("cpu")
    for one in json.loads(Path(sys.argv[1]).read_text()):
        place = Settings(directory=Path(one["directory"]), wandb=False, device="cpu")
        try:
            jobs.run(
                jobs.Job(
                    script=Path(one["script"]),
                    arguments=tuple(one["arguments"]),
                    nproc=one["nproc"],
                    settings=split(one["flags"], place)[0],
                    environment={"TTRACE_CACHE": one["cache"], **one["environment"]},
                ),
                fork=fork,
            )
        except TTraceError as error:
            print(f"{one['directory']}: {error}", file=sys.stderr)
            sys.exit(2)
