# SPDX-License-Identifier: Apache-2.0
"""Offering the operators under the names of their packages."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

from megatron_ttrace.cpu.stand_in import offer

_HOME = "megatron_ttrace.cpu.operators"

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
    "fused_weight_gradient_mlp_cuda": {
        "weight_gradient": "wgrad_gemm_accum_fp32 wgrad_gemm_accum_fp16"
    },
    "fast_hadamard_transform": {"hadamard": "hadamard_transform"},
}

_VERSIONS = {"causal_conv1d": "1.5.3", "mamba_ssm": "2.2.6", "fla": "0.4.0"}
"""What Megatron takes the packages for."""


def install() -> None:
    """Offer what no installed package offers. Nothing is imported before Megatron asks for it."""
    missing = {
        package
        for package in {name.partition(".")[0] for name in _OFFERED}
        if package not in sys.modules and importlib.util.find_spec(package) is None
    }
    for name, homes in _OFFERED.items():
        package = name.partition(".")[0]
        if package not in missing:
            continue
        contents: dict[str, Any] = {}
        for home, words in homes.items():
            module: ModuleType = importlib.import_module(f"{_HOME}.{home}")
            contents |= {word: getattr(module, word) for word in words.split()}
        if name == package and package in _VERSIONS:
            contents["__version__"] = _VERSIONS[package]
        offer(name, contents)
