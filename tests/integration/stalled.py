# SPDX-License-Identifier: Apache-2.0
"""launch/pretrain_gpt.py in which rank 0 enters a collective that rank 1 never joins.

``STALL`` says where: ``forward`` (in the MLP of layer 0), ``building`` (the model), ``sizes`` (both
enter it there, with tensors of different sizes), ``slow`` (both wait 8 s and go on).
"""

import importlib.util
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import megatron_ttrace

megatron_ttrace.enable()

from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.transformer.mlp import MLP  # noqa: E402

from megatron_ttrace.run import stall  # noqa: E402

stall.SECONDS = 3.0
WHERE = os.environ["STALL"]
FIRST = []


def meet() -> None:
    """Wait for a rank that does not come, or comes late."""
    if FIRST:
        return
    FIRST.append(True)
    rank = dist.get_rank()
    if WHERE == "slow" and rank:
        time.sleep(8)
    if WHERE in ("slow", "sizes") or rank == 0:
        dist.all_reduce(torch.ones(4 + 4 * rank * (WHERE == "sizes")), group=GROUP[0])


GROUP = []
build, forward = GPTModel.__init__, MLP.forward


def building(self, *args, **keywords):
    """Build, and perhaps wait."""
    build(self, *args, **keywords)
    GROUP.append(dist.new_group([0, 1]))
    if WHERE == "building":
        meet()
        dist.barrier()


def computing(self, *args, **keywords):
    """Compute, and perhaps wait."""
    if WHERE != "building" and "reference" not in os.sys.argv:
        meet()
    return forward(self, *args, **keywords)


GPTModel.__init__, MLP.forward = building, computing
if "reference" in os.sys.argv:
    GPTModel.__init__, MLP.forward = build, forward
spec = importlib.util.spec_from_file_location(
    "pretrain_gpt", Path(__file__).parents[2] / "launch" / "pretrain_gpt.py"
)
training = importlib.util.module_from_spec(spec)
spec.loader.exec_module(training)
training.main()
