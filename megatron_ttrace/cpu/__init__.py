# SPDX-License-Identifier: Apache-2.0
"""Run the unmodified ``megatron.core`` and ``megatron.training`` on CPU tensors over gloo.

Megatron assumes CUDA in many small ways. Each module here replaces one kind of assumption, says
what Megatron expects and why the replacement computes the same numbers. Nothing is replaced until
:func:`activate` is called, and nothing of a GPU run is ever touched.
"""

from megatron_ttrace.cpu.arguments import adapt_arguments, banner
from megatron_ttrace.cpu.backend import activate, active, needed

__all__ = ["activate", "active", "adapt_arguments", "banner", "needed"]
