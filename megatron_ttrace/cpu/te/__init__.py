# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's interface in plain PyTorch, for machines without a GPU.

Megatron's default layers are TransformerEngine's: only they do context parallelism, FP8, and
sequence parallelism with RMSNorm. These modules compute the same formulas with the same
communication, so that Megatron's own wrappers run unmodified over gloo. They are offered under
TransformerEngine's module names by ``activate()`` only, and never when the real one imports.
"""

from megatron_ttrace.cpu.te import releases
from megatron_ttrace.cpu.te.offering import emulated, install, real_present

__all__ = ["emulated", "install", "real_present", "releases"]
