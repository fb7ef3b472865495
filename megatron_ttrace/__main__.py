# SPDX-License-Identifier: Apache-2.0
"""``python -m megatron_ttrace``."""

import sys

from megatron_ttrace.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
