# SPDX-License-Identifier: Apache-2.0
"""The parts of NVIDIA's Apex without which Megatron leaves the code that it runs on GPUs.

Megatron's ``FusedLayerNorm`` is the only layer norm of the local layer specification that works
with sequence parallelism: without Apex, ``WrappedTorchNorm`` refuses it. Its forward pass calls an
autograd function of Apex's, which is offered here under Apex's name, when the real Apex is absent.
Like Apex's kernels it computes in float32 whatever the input's type and rounds once at the end.

Apex's optimizers are TransformerEngine's (``te/optimizers.py``). Its multi-tensor kernels
(``amp_C``) are *not* offered: without them Megatron takes its own ``local_multi_tensor_*``
functions; without its persistent norm (``apex.contrib``), this one.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence

import torch

from megatron_ttrace.cpu.stand_in import offer
from megatron_ttrace.cpu.te.norms import NormKind, normalise


class FusedLayerNormAffineFunction:
    """Layer norm with weight and bias over the last dim, the only one that Megatron normalises."""

    @staticmethod
    def forward(
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        normalized_shape: Sequence[int],
        eps: float,
    ) -> torch.Tensor:
        """Normalise; Megatron asks this function's arguments which version of Apex there is."""
        normalised = normalise(input, weight, bias, NormKind("LayerNorm", eps))
        return normalised.to(weight.dtype)  # as the persistent kernel, of a float32 residual

    apply = forward


def real_apex_present() -> bool:
    """Say whether NVIDIA's Apex is there; the package index's ``apex`` is another project."""
    try:
        return importlib.util.find_spec("apex.normalization.fused_layer_norm") is not None
    except (ImportError, ValueError, AttributeError):
        return False


def install() -> None:
    """Offer norms under Apex's module names, unless the real Apex is installed."""
    if real_apex_present():
        return
    fused = FusedLayerNormAffineFunction
    offer("apex", {})
    offer("apex.normalization", {})
    # The module is for Megatron-Bridge, which asks for it and reports a failure with a traceback.
    norms = {fused.__name__: fused, "MixedFusedLayerNorm": torch.nn.LayerNorm}
    offer("apex.normalization.fused_layer_norm", norms)


def choose_local_norm(normalization: str) -> None:
    """Let Megatron's local layers use the norm class that can compute ``normalization``.

    Megatron chooses once, on import: ``FusedLayerNorm`` when Apex imports. That class refuses
    RMSNorm, which its other one, ``WrappedTorchNorm``, computes; so what a machine without Apex
    would have chosen is put in place for RMSNorm, and taken back for LayerNorm.
    """
    fused = importlib.import_module("megatron.core.fusions.fused_layer_norm").FusedLayerNorm
    wrapped = importlib.import_module("megatron.core.transformer.torch_norm").WrappedTorchNorm
    chosen, replaced = (fused, wrapped) if normalization == "LayerNorm" else (wrapped, fused)
    for name, module in list(sys.modules.items()):
        if not name.startswith("megatron.core."):
            continue
        for variable in ("LNImpl", "LayerNormImpl"):
            if vars(module).get(variable) is replaced:
                setattr(module, variable, chosen)
