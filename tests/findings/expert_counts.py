# SPDX-License-Identifier: Apache-2.0
"""How many experts' biases move wrongly if their tokens are counted in bf16.

Calls Megatron's update with counts in both dtypes: 64 experts, top 8, 4,096 tokens per microbatch,
shares within 1 % of equal.
"""

import megatron_ttrace

megatron_ttrace.enable()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core.transformer.moe.moe_utils import get_updated_expert_bias  # noqa: E402

EXPERTS, TOP, TOKENS, MICROBATCHES = 64, 8, 4096, (1, 16, 64)


def wrong(microbatches: int, share: torch.Tensor) -> tuple[float, int]:
    """The largest relative error of a count, and the number of biases that move wrongly."""
    exact, rounded = torch.zeros(EXPERTS, dtype=torch.float64), torch.zeros(EXPERTS).bfloat16()
    for _ in range(microbatches):
        chosen = torch.rand(TOKENS, EXPERTS).log().div(share).topk(TOP, dim=1).indices
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
        exact += counts
        rounded += counts
    right, moved = (
        get_updated_expert_bias(tokens.clone(), torch.zeros(EXPERTS), 1e-3, dist.group.WORLD)
        for tokens in (exact.float(), rounded)
    )
    error = ((rounded.double() - exact) / exact).abs().max().item()
    return error, int((right.sign() != moved.sign()).sum())


if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    share = torch.rand(EXPERTS) * 0.02 + 0.99
    for microbatches in MICROBATCHES:
        error, biases = wrong(microbatches, share)
        print(
            f"{microbatches} microbatches: counts off by up to {error:.1%}, "
            f"{biases} of {EXPERTS} biases move wrongly"
        )
    dist.destroy_process_group()
