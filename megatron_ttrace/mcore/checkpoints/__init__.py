# SPDX-License-Identifier: Apache-2.0
"""Weights in checkpoints, read by safetensors or by Megatron itself."""
