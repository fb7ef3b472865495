# SPDX-License-Identifier: Apache-2.0
"""Operators that Megatron takes from packages of GPU kernels, in plain PyTorch.

A package that is installed and can be imported is left alone.
"""

from megatron_ttrace.cpu.operators.offering import install

__all__ = ["install"]
