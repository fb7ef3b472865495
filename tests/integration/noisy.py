# SPDX-License-Identifier: Apache-2.0
"""Train with noise in the second layer's MLP on all ranks of a run that has several.

No repair explains it. The rest is done by ``faulty.py``.
"""

import runpy
from pathlib import Path

import torch

import megatron_ttrace

megatron_ttrace.enable()

from megatron.core.transformer.mlp import MLP  # noqa: E402
from megatron.core.transformer.transformer_layer import TransformerLayer  # noqa: E402

build, forward = TransformerLayer.__init__, MLP.forward


def built(self, *args, **kwargs):
    build(self, *args, **kwargs)
    self.mlp.is_noisy = self.layer_number == 2


def noisy(self, *args, **kwargs):
    output, bias = forward(self, *args, **kwargs)
    if self.is_noisy and torch.distributed.get_world_size() > 1:
        generator = torch.Generator().manual_seed(1)
        output = output + torch.randn(output.shape, generator=generator) * output.std() * 0.1
    return output, bias


TransformerLayer.__init__, MLP.forward = built, noisy
runpy.run_path(str(Path(__file__).with_name("faulty.py")), run_name="__main__")
