# SPDX-License-Identifier: Apache-2.0
"""For scripts of Megatron-Bridge: ``pretrain(config, step, callbacks=[TTraceCallback()])``."""

from __future__ import annotations

from megatron_ttrace.run.callback import TTraceCallback

__all__ = ["TTraceCallback"]
