# SPDX-License-Identifier: Apache-2.0
"""Offering the modules under TransformerEngine's names."""

import importlib
import sys
from typing import Any

from megatron_ttrace.cpu.stand_in import offer_all
from megatron_ttrace.cpu.te import releases

_PACKAGE = "megatron_ttrace.cpu.te"

#: Module, and what it offers: ``home: names``, where home is a module of this package.
_OFFERED: dict[str, dict[str, str]] = {
    "transformer_engine": {},
    "transformer_engine.common": {},
    "transformer_engine.common.recipe": {
        "recipes": "Format Recipe DelayedScaling Float8CurrentScaling Float8BlockScaling "
        "MXFP8BlockScaling NVFP4BlockScaling CustomRecipe",
    },
    "transformer_engine.pytorch": {
        "linear": "LayerNormLinear Linear",
        "grouped_linear": "GroupedLinear",
        "norms": "LayerNorm RMSNorm",
        "attention": "DotProductAttention",
        "fp8": "autocast fp8_autocast fp8_model_init quantized_model_init",
        "distributed": "CudaRNGStatesTracker checkpoint",
        "permutation": "Fp8Padding Fp8Unpadding",
        "names": "UserBufferQuantizationMode",
        "parallel": "initialize_ub",
    },
    "transformer_engine.pytorch.attention": {"attention": "DotProductAttention"},
    "transformer_engine.pytorch.constants": {
        "distributed_weight": "MXFP8_BLOCK_SCALING_SIZE NVFP4_BLOCK_SCALING_SIZE",
    },
    "transformer_engine.pytorch.attention.rope": {"rope": "apply_rotary_pos_emb"},
    "transformer_engine.pytorch.cpp_extensions": {"gemm": "general_gemm"},
    "transformer_engine.pytorch.cross_entropy": {"cross_entropy": "parallel_cross_entropy"},
    "transformer_engine.pytorch.distributed": {
        "distributed": "CudaRNGStatesTracker activation_recompute_forward checkpoint "
        "in_fp8_activation_recompute_phase is_fp8_activation_recompute_enabled",
        "names": "_NVFP4AllGatherAsyncHandle",
        "parallel": "gather_along_first_dim reduce_scatter_along_first_dim",
    },
    "transformer_engine.pytorch.fp8": {
        "fp8": "FP8GlobalStateManager fp8_autocast fp8_model_init",
    },
    "transformer_engine.pytorch.module": {
        "linear": "LayerNormLinear Linear",
        "grouped_linear": "GroupedLinear",
    },
    "transformer_engine.pytorch.module.base": {
        "base": "TransformerEngineBaseModule",
        "distributed_weight": "get_dummy_wgrad",
        "names": "UserBufferQuantizationMode",
        "parallel": "initialize_ub",
    },
    "transformer_engine.pytorch.ops": {"names": "FusibleOperation Sequential"},
    "transformer_engine.pytorch.optimizers": {
        "optimizers": "FusedAdam FusedSGD multi_tensor_applier multi_tensor_l2norm "
        "multi_tensor_scale multi_tensor_scale_tensor",
    },
    "transformer_engine.pytorch.permutation": {
        "permutation": "moe_permute moe_permute_with_probs moe_sort_chunks_by_index "
        "moe_sort_chunks_by_index_with_probs moe_unpermute",
    },
    "transformer_engine.pytorch.quantized_tensor": {"names": "QuantizedTensor"},
    "transformer_engine.pytorch.router": {
        "router": "fused_compute_score_for_moe_aux_loss fused_moe_aux_loss "
        "fused_topk_with_score_function",
    },
    "transformer_engine.pytorch.tensor": {
        "names": "MXFP8TensorStorage NVFP4TensorStorage QuantizedTensor",
    },
    "transformer_engine.pytorch.tensor.float8_tensor": {"names": "Float8Tensor"},
    "transformer_engine.pytorch.tensor.mxfp8_tensor": {"names": "MXFP8Quantizer MXFP8Tensor"},
    "transformer_engine.pytorch.tensor.float8_blockwise_tensor": {
        "names": "Float8BlockwiseQTensor"
    },
    "transformer_engine.pytorch.utils": {
        "distributed_weight": "nvtx_range_pop nvtx_range_push round_up_to_nearest_multiple",
    },
    "transformer_engine.pytorch.float8_tensor": {"names": "Float8Tensor"},
    "transformer_engine_torch": {
        "context_parallel": "thd_get_partitioned_indices",
        "names": "DType",
    },
}

_ROOTS = ("transformer_engine", "transformer_engine_torch")

_emulated = False


def real_present() -> bool:
    """Say whether the real TransformerEngine's PyTorch part imports.

    The package can be installed and still not import, so its name says nothing.
    """
    if _emulated:
        return False
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception:  # noqa: BLE001 - a half-installed one fails in any way it likes
        for name in [name for name in sys.modules if name.split(".")[0] in _ROOTS]:
            del sys.modules[name]
        return False
    return True


def emulated() -> bool:
    """Say whether this package stands in for TransformerEngine."""
    return _emulated


def install() -> None:
    """Offer the modules, unless they are offered already or the real TransformerEngine is there."""
    global _emulated
    if _emulated or real_present():
        return
    offer_all(_PACKAGE, _OFFERED)
    engine: Any = sys.modules["transformer_engine"]
    engine.__version__ = releases.current()
    _emulated = True
