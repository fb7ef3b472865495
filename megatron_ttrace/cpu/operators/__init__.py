# SPDX-License-Identifier: Apache-2.0
"""Operators that Megatron takes from packages of GPU kernels, in plain PyTorch.

A package that is installed and can be imported is left alone.
"""

import importlib.util
import sys

from megatron_ttrace.cpu.stand_in import offer_all

_OFFERED: dict[str, dict[str, str]] = {
    "causal_conv1d": {"conv1d": "causal_conv1d_fn"},
    "causal_conv1d.causal_conv1d_varlen": {"conv1d": "causal_conv1d_varlen_states"},
    "mamba_ssm": {},
    "mamba_ssm.ops": {},
    "mamba_ssm.ops.triton": {},
    "mamba_ssm.ops.triton.layernorm_gated": {"mamba": "RMSNorm"},
    "mamba_ssm.ops.triton.ssd_combined": {
        "mamba": "mamba_chunk_scan_combined mamba_split_conv1d_scan_combined"
    },
    "fla": {},
    "fla.modules": {},
    "fla.modules.convolution": {"delta_rule": "causal_conv1d"},
    "fla.modules.l2norm": {"delta_rule": "l2norm"},
    "fla.ops": {},
    "fla.ops.gated_delta_rule": {"delta_rule": "chunk_gated_delta_rule"},
    "fused_weight_gradient_mlp_cuda": {"matrices": "wgrad_gemm_accum_fp32 wgrad_gemm_accum_fp16"},
    "fast_hadamard_transform": {"matrices": "hadamard_transform"},
}
#: What Megatron takes the packages for.
_VERSIONS = {"causal_conv1d": "1.5.3", "mamba_ssm": "2.2.6", "fla": "0.4.0"}


def install() -> None:
    """Offer what no installed package offers."""
    missing = {
        package
        for package in {name.partition(".")[0] for name in _OFFERED}
        if package not in sys.modules and importlib.util.find_spec(package) is None
    }
    offered = {name: homes for name, homes in _OFFERED.items() if name.split(".")[0] in missing}
    offer_all(__name__, offered)
    for package in missing & _VERSIONS.keys():
        vars(sys.modules[package])["__version__"] = _VERSIONS[package]
