# SPDX-License-Identifier: Apache-2.0
"""Train a model whose second layer's MLP adds noise that no seed decides, on every rank."""

from pathlib import Path

import numpy
import torch

import megatron_ttrace

megatron_ttrace.enable()

from megatron.core.transformer.mlp import MLP  # noqa: E402
from megatron.core.transformer.transformer_layer import TransformerLayer  # noqa: E402

build, forward = TransformerLayer.__init__, MLP.forward
generator = numpy.random.default_rng()


def built(self, *args, **kwargs):
    build(self, *args, **kwargs)
    self.mlp.is_noisy = self.layer_number == 2


def noisy(self, *args, **kwargs):
    output, bias = forward(self, *args, **kwargs)
    if self.is_noisy:
        noise = torch.from_numpy(generator.standard_normal(output.shape)).to(output.dtype)
        output = output + noise * output.std() * 1e-3
    return output, bias


TransformerLayer.__init__, MLP.forward = built, noisy
script = Path(__file__).resolve().parents[2] / "launch" / "pretrain_gpt.py"
# Not runpy, which changes sys.argv: the reference would run without the changes made here.
exec(
    compile(script.read_text(), str(script), "exec"),
    {"__name__": "__main__", "__file__": str(script)},
)
