# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.jobs.recognised JOBS``: which findings jobs show, by their final options.

JOBS is a JSON list of arguments and ranks. A job that Megatron refuses has ``null``.
"""

import json
import sys

import megatron_ttrace
from megatron_ttrace.jobs import known_faults, validity

jobs = json.loads(sys.argv[1])
megatron_ttrace.enable()
every = [validity.options(words, ranks) for words, ranks in jobs]
print(json.dumps([known_faults.finding_of(o, "0.19.2") if o else None for o in every]))
