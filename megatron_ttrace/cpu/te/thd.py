# SPDX-License-Identifier: Apache-2.0
"""The one function of TransformerEngine's compiled extension that Megatron calls itself."""

import torch

from megatron_ttrace.cpu.te.context_parallel import partitioned_indices


def thd_get_partitioned_indices(
    cu_seqlens: torch.Tensor, total_tokens: int, cp_size: int, cp_rank: int
) -> torch.Tensor:
    """Indices among packed tokens of those that a context-parallel rank holds."""
    return partitioned_indices(cu_seqlens, total_tokens, cp_size, cp_rank)
