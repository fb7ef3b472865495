# SPDX-License-Identifier: Apache-2.0
"""Which positions YaRN's cached rotary angles belong to, on two context-parallel ranks.

``get_cached_cos_sin`` is what multi-head latent attention takes with ``--apply-rope-fusion``,
``forward`` what it takes without. Both must give a rank the angles of its own positions.
"""

import megatron_ttrace

megatron_ttrace.enable()

import torch  # noqa: E402
from megatron.core.models.common.embeddings import YarnRotaryEmbedding  # noqa: E402

LENGTH, LONGEST, CP = 8, 16, 2


class Group:
    """A process group's size and rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return CP


def positions() -> list[tuple[list[int], list[int]]]:
    """For each rank the positions of the angles without and with the cache."""
    found = []
    for rank in range(CP):
        rope = YarnRotaryEmbedding(
            2,
            # One frequency of 1, not interpolated: an angle is its position.
            scaling_factor=1.0,
            original_max_position_embeddings=LONGEST,
            use_cpu_initialization=True,
            cp_group=Group(rank),
        )
        angles = rope(LENGTH)[0][..., 0].flatten()
        cos, sin = (part[..., 0].flatten() for part in rope.get_cached_cos_sin(LENGTH))
        cached = torch.atan2(sin, cos).remainder(2 * torch.pi)
        steps = torch.arange(LONGEST).remainder(2 * torch.pi)
        known = (cached[:, None] - steps).abs().argmin(1)
        found.append((angles.int().tolist(), known[: LENGTH // CP].tolist()))
    return found


if __name__ == "__main__":
    for rank, (computed, cached) in enumerate(positions()):
        print(f"rank {rank}: positions {computed}, with the cache {cached}")
