# SPDX-License-Identifier: Apache-2.0
"""A candidate's configuration, as its ``meta.json`` and ``summary.json`` hold it.

In the files, the sizes of the mesh's axes stand beside these fields.
"""

import dataclasses
from typing import Any

from megatron_ttrace.compare.exactness import Arithmetic
from megatron_ttrace.compare.exercised import Requested
from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.trace.codec import Count, Record
from megatron_ttrace.trace.records import Kind


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(Record):
    """What was checked, and how; what an older trace lacks has its default.

    ``layers``, ``hidden`` size and ``seq_length`` are 0 if unknown, ``arithmetic`` is ``None``.

    Attributes:
        weight_shards: ranks that gather each weight, or each weight of an expert if these are more.
        recomputes: whether activations are recomputed.
        dispatcher: Megatron's ``--moe-token-dispatcher-type``, empty without experts.
        own_tokens: indices of the ``routing`` tensors of a router that depend on all tokens of a
            rank, where a rank has a part of a microbatch.
        own_shards: kinds of tensors of a matrix that depend on a rank's whole shard of it.
        iterations: those that were traced.
        isolate: every module was given the reference's tensors.
        logs: whether Megatron's ``training_log`` could be called.
        follows_dropout: whether calls of dropout could be followed, if there were any.
        init: where the start values came from (``--ttrace-init``).
        reference: directory of the reference.
    """

    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    dtype: str = ""
    layers: Count = 0
    hidden: Count = 0
    seq_length: Count = 0
    weight_shards: Count = 1
    recomputes: bool = False
    dispatcher: str = ""
    own_tokens: tuple[Count, ...] = ()
    own_shards: tuple[Kind, ...] = ()
    iterations: tuple[Count, ...] = ()
    isolate: bool = False
    logs: bool = False
    follows_dropout: bool = False
    init: str = ""
    reference: str = ""
    arithmetic: Arithmetic | None = None
    requested: Requested = dataclasses.field(default_factory=Requested)

    def on(self, mesh: Mesh) -> dict[str, Any]:
        """The ``config`` object of a run on ``mesh``."""
        return {**mesh.describe(), **self.to_json()}
