# SPDX-License-Identifier: Apache-2.0
"""Updates that depend on a rank's whole shard of a matrix, not on each of its elements alone.

Muon orthogonalises the momentum of a matrix. With ``--muon-tp-mode blockwise``, the default, each
tensor-parallel rank does so with its own shard (``TensorParallelMuon.orthogonalize`` in
megatron/core/optimizer/emerging_optimizers.py). SOAP always preconditions a rank's own shard, also
of weights that ranks gather, which Muon gathers. So the update differs from a single device's by
design.
"""

from collections.abc import Sequence

from megatron_ttrace.mcore.arguments import MegatronArguments
from megatron_ttrace.mcore.roles import is_shared_embedding
from megatron_ttrace.mcore.sharded_weights import SHARDS_OF_WEIGHTS
from megatron_ttrace.trace.records import Kind


def depends_on_layout(args: MegatronArguments) -> tuple[tuple[Kind, ...], str]:
    """What of a matrix's update differs in this layout by design, and because of which option.

    Returns:
        Kinds of tensors (of ``param`` that after the step), and the option; ``()`` and ``""`` where
        every rank steps whole matrices.
    """
    name = str(getattr(args, "optimizer", "")).removeprefix("dist_")
    sizes: tuple[str, ...] = ("tensor_model_parallel_size", "expert_tensor_parallel_size")
    if name == "soap":
        sizes = (*sizes, *SHARDS_OF_WEIGHTS)
    if all((getattr(args, size, 1) or 1) == 1 for size in sizes):
        return (), ""
    if name == "soap":
        moments = (Kind.EXP_AVG, Kind.EXP_AVG_SQ)
        return (Kind.PARAM_DELTA, Kind.PARAM, *moments), "--optimizer soap"
    if name in ("muon", "adaptive_muon") and getattr(args, "muon_tp_mode", "") == "blockwise":
        kinds = (Kind.PARAM_DELTA, Kind.PARAM, Kind.EXP_AVG_SQ)
        return kinds, f"--optimizer {name} --muon-tp-mode blockwise"
    return (), ""


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether these optimizers step a parameter: matrices, but for those of tokens.

    ``_is_nonlinear_or_embedding`` in emerging_optimizers.py gives all others to Adam.
    """
    return len(shape) == 2 and not is_shared_embedding(name)
