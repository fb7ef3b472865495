# SPDX-License-Identifier: Apache-2.0
"""``job.py`` with a mistake of ``tests/assay/planted``, which ``TTRACE_TEST_PLANTED`` names."""

import os
import sys

import job

from tests.assay.planted import bridge  # noqa: F401 - registers its mistakes
from tests.assay.planted.mistakes import PLANTED, plant

plant(os.environ[PLANTED])
job.main(*sys.argv[1:])
