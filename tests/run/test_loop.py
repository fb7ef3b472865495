# SPDX-License-Identifier: Apache-2.0
"""What a check does beside training leaves no trace in it."""

import random
from types import SimpleNamespace
from typing import Any

from megatron_ttrace.run.loop import Watch


def test_pythons_random_state_is_kept() -> None:
    """Importing rich, for one, draws a number: without a check, the job would have drawn it."""
    watch: Any = Watch.__new__(Watch)
    watch._ranks = SimpleNamespace(together=lambda task, work: work())
    random.seed(5)
    drawn = watch._attempt("checking", random.random)
    assert drawn == random.random()
