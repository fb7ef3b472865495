# SPDX-License-Identifier: Apache-2.0
"""``python driver.py FOLDER WORDS...``: the command ``ttrace`` with another catalogue of bugs.

Ranks are forks of this process, so they see that catalogue too.
"""

import sys
from pathlib import Path

from megatron_ttrace.cli.main import main
from megatron_ttrace.evaluation.bugs import catalogue

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    catalogue.folder = lambda: folder
    sys.exit(main(sys.argv[2:]))
