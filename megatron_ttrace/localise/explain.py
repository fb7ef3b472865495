# SPDX-License-Identifier: Apache-2.0
"""Why does it differ? A hypothesis counts only when the repair it names brings the error down."""

from __future__ import annotations

from pathlib import Path

from megatron_ttrace.compare.tolerance import Tolerances
from megatron_ttrace.errors import TTraceError
from megatron_ttrace.localise.culprits import UNKNOWN
from megatron_ttrace.records import Verdict
from megatron_ttrace.trace.store import TraceReader


class Explainer:
    """Explains failed tensors from the shards that were kept of them."""

    def __init__(self, reference: TraceReader, candidate: Path, tolerances: Tolerances) -> None:
        self._reference = reference
        self._tolerances = tolerances
        try:
            self._candidate: TraceReader | None = TraceReader(candidate)
        except TTraceError:
            self._candidate = None

    def explain(self, verdict: Verdict) -> str:
        """One sentence, or "unknown"."""
        return UNKNOWN
