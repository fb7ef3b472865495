# SPDX-License-Identifier: Apache-2.0
"""Traces on disk: safetensors per rank, a JSONL index, and a ``meta.json`` that seals them."""
