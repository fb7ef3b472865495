# SPDX-License-Identifier: Apache-2.0
"""How a rank's local tensor sits in the logical tensor. Pure: no tensors, no processes.

A *placement* is a sequence of steps, one per mesh axis, outermost first, e.g. context parallel
zig-zag, then sequence parallel shard. Planning turns it into *boxes*; comparing, merging and
coverage know boxes only. Each step's rule lives in a short module of its own.
"""

from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.placement.plan import Placements, Step, describe, local_shape, plan

__all__ = ["Box", "Mesh", "Placements", "Step", "describe", "local_shape", "plan"]
