# SPDX-License-Identifier: Apache-2.0
"""What is decided on of a candidate's configuration.

A candidate's ``meta.json`` and ``summary.json`` have a ``config`` for people; this is the part
of it that the comparison reads, validated once.
"""

from __future__ import annotations

import dataclasses

from megatron_ttrace.compare.exactness import Arithmetic
from megatron_ttrace.compare.exercised import Requested
from megatron_ttrace.trace.codec import Count, Record


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(Record):
    """A candidate's configuration; what an older trace lacks has its default.

    Attributes:
        layers: of the model, 0 if unknown.
        seq_length: tokens of a sample, 0 if unknown.
        dispatcher: Megatron's ``--moe-token-dispatcher-type``, empty without experts.
        isolate: whether every module was given the reference's tensors.
        reference: directory of the reference.
        arithmetic: what decides in which order things are added up, ``None`` if unknown.
        requested: features that the arguments ask for.
    """

    layers: Count = 0
    seq_length: Count = 0
    dispatcher: str = ""
    isolate: bool = False
    reference: str = ""
    arithmetic: Arithmetic | None = None
    requested: Requested = dataclasses.field(default_factory=Requested)
