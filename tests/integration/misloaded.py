# SPDX-License-Identifier: Apache-2.0
"""Train with two mistakes in the description of checkpoints, which only a divided model shows.

Each tensor-parallel rank loads another rank's half of the vocabulary, and the MLP's halves, gate
and up projection, are divided as one matrix. With ``SOUND`` in the environment there are none.
"""

import os
from pathlib import Path

import megatron_ttrace

megatron_ttrace.enable()

from megatron.core.tensor_parallel.layers import VocabParallelEmbedding  # noqa: E402
from megatron.core.transformer import mlp  # noqa: E402

describe = VocabParallelEmbedding.sharded_state_dict


class OtherRank:
    """A tensor-parallel group in which this rank has another one's number."""

    def __init__(self, group):
        self._group = group

    def size(self):
        return self._group.size()

    def rank(self):
        return self.size() - 1 - self._group.rank()


def swapped(self, *args, **kwargs):
    group = self.tp_group
    self.tp_group = OtherRank(group)
    try:
        return describe(self, *args, **kwargs)
    finally:
        self.tp_group = group


if "SOUND" not in os.environ:
    VocabParallelEmbedding.sharded_state_dict = swapped
    mlp.apply_swiglu_sharded_factory = lambda described, *args, **kwargs: described

script = Path(__file__).resolve().parents[2] / "launch" / "pretrain_gpt.py"
# Not runpy, which changes sys.argv: the reference would run without the changes made here.
exec(
    compile(script.read_text(), str(script), "exec"),
    {"__name__": "__main__", "__file__": str(script)},
)
