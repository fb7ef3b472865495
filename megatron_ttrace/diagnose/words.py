# SPDX-License-Identifier: Apache-2.0
"""What names of functions and factors say: the words that have to do with a failure."""

from __future__ import annotations

import functools
import re

from megatron_ttrace.trace.collectives import Function
from megatron_ttrace.trace.counted import Statistic
from megatron_ttrace.trace.findings import Cause, Loss, Term
from megatron_ttrace.trace.records import Kind

_COMMUNICATE = {"reduce", "allreduce", "gather", "scatter", "broadcast", "sync"}
PARAMETERS = {"param", "params"}
EVERYWHERE = {"decoder", "layers", "model", "weight", "bias"}

UNFILLED = "unfilled"
WORDS: dict[object, str] = {
    UNFILLED: "copy grads",
    Kind.MAIN_GRAD: "grad grads",
    Kind.GRAD_NORM: "norm grad",
    Kind.GRAD_OUTPUT: "grad gradient gradients",
    Kind.GRAD_INPUT: "grad gradient gradients",
    Kind.LOSS: "loss",
    Kind.PARAM: "param params sync gather",
    Kind.PARAM_DELTA: "step param params",
    Kind.HYPERPARAMETERS: "group groups",
    Kind.INITIAL: "initialize reset",
    Kind.ROUTING: "routing topk",
    Statistic.CLIPPED: "clip norm grad",
    Statistic.STEPPED: "step group groups",
    Loss.AUXILIARY: "aux loss",
    Loss.SEQUENCE: "aux seq loss",
    Loss.GLOBAL: "aux global loss",
    Loss.Z: "z loss",
    Loss.MTP: "mtp loss",
    Loss.INDEXER: "indexer loss",
    Cause.LAYERS: "layers num build",
    Cause.LAYER_NUMBERS: "layer offset",
    Term.LOGARITHM: "loss log",
    Term.LABEL: "predicted target label",
    Term.SOFTMAX: "softmax exp loss",
    "clipping": "clip",
    "loss_scale": "loss scale",
    "auxiliary": "aux loss",
}
"""Words in the names of functions that make something, or apply a factor."""
NAMED: dict[object, set[str]] = {
    key: {*WORDS[key].split()}
    for key in ("clipping", "loss_scale", "auxiliary", *Loss)
    if key in WORDS
}
"""Words in the names of factors: of those that a finding names, and of losses."""


@functools.cache
def tokens(name: str) -> tuple[str, ...]:
    """The words of a name, in lower case."""
    return tuple(word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name))


def communicates(function: Function) -> bool:
    """Whether a function sends something, by its name."""
    words = tokens(function.name)
    return not _COMMUNICATE.isdisjoint(words) or "alltoall" in "".join(words)


def loss_of(function: Function) -> Loss | None:
    """The loss that a function is named for."""
    words = {*tokens(function.name)}
    fits = {loss: len(NAMED[loss]) for loss in Loss if NAMED.get(loss, {""}) <= words}
    return max(fits, key=lambda loss: fits[loss], default=None)
