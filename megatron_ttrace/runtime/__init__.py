# SPDX-License-Identifier: Apache-2.0
"""A run from its first line to its verdict."""

PRELOADED = (
    "megatron_ttrace.runtime.candidate",
    "megatron_ttrace.runtime.entry",
    "megatron_ttrace.runtime.injection",
    "megatron_ttrace.runtime.loop",
    "megatron_ttrace.runtime.reference_run",
    "torch._dynamo",  # optimizers import it, for a decorator
)
"""Modules that every rank of a check imports, for a parent that imports them once and forks."""
