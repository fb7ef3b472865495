# SPDX-License-Identifier: Apache-2.0
"""A run from its first line to its verdict."""

PRELOADED = (
    "megatron_ttrace.run.candidate",
    "megatron_ttrace.run.entry",
    "megatron_ttrace.run.injection",
    "megatron_ttrace.run.loop",
    "megatron_ttrace.run.reference_run",
    "torch._dynamo",  # optimizers import it, for a decorator
)
"""Modules that every rank of a check imports, for a parent that imports them once and forks."""
