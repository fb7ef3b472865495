# SPDX-License-Identifier: Apache-2.0
"""Activations inside experts, where a dispatcher has carried tokens between ranks.

With experts on several ranks an expert sees tokens of other data-parallel ranks' microbatches, in
the order of their arrival, and with expert tensor parallelism its output is a summand that the
dispatcher adds up. Such a tensor has no box in one logical tensor; it needs the identity of its
tokens (``TokenIndex``). Until that is captured it is *unchecked* with this reason; the layer around
it, the router, and the experts' parameters and gradients are judged.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.records import STEP_LEVEL, TraceKey

REASON = "dispatched: tokens of several ranks meet in an expert; its layer is judged as a whole"


def unjudged(mesh: Mesh) -> Callable[[TraceKey], str]:
    """Why a tensor cannot be compared in a layout; empty for all that can."""
    return lambda key: REASON if is_dispatched(key, mesh) else ""


def is_dispatched(key: TraceKey, mesh: Mesh) -> bool:
    """Whether ``key`` is an activation of experts that are spread over ranks."""
    spread = mesh.size("ep") > 1 or mesh.size("etp") > 1
    return spread and key.microbatch != STEP_LEVEL and ".experts." in f".{key.name}."
