# SPDX-License-Identifier: Apache-2.0
"""``alone.py SCRIPT ARGS``: a training script without a check, on a CPU if there is no GPU."""

import sys
from pathlib import Path

from megatron_ttrace.jobs import script

if __name__ == "__main__":
    path, *words = sys.argv[1:]
    script.run(path, words, script.search_path(Path(path)), enabled=True)
