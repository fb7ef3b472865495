# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.ranks N SCRIPT ARGS``: what torchrun does on one machine, by forking.

All ranks' output goes to standard output and to standard error. Exit code 0 when every rank's is,
else 1, as torchrun's. ``TTRACE_TEST_LOGS`` names a directory that keeps logs and exit codes.
"""

import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path

from megatron_ttrace.jobs.processes import forkserver
from megatron_ttrace.jobs.processes.ranks import log_of, run_ranks

LOGS = "TTRACE_TEST_LOGS"


def main(nproc: int, command: list[str]) -> int:
    """Run and repeat the logs."""
    forkserver.preload(Path(command[0]))
    kept = os.environ.pop(LOGS, "")
    with contextlib.nullcontext(kept) if kept else tempfile.TemporaryDirectory() as home:
        codes = run_ranks(nproc, [sys.executable, *command], Path(home), fork=True).codes
        if kept:
            Path(home, "codes.json").write_text(json.dumps(codes))
        for rank in range(nproc):
            text = log_of(Path(home), rank).read_text(errors="replace")
            sys.stdout.write(text)
            sys.stderr.write(text)
    return int(any(codes) or None in codes)


if __name__ == "__main__":
    os.environ.pop("TTRACE_RUN_ID", None)
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
