# SPDX-License-Identifier: Apache-2.0
"""Updates that depend on a rank's whole shard of a matrix, not on each of its elements alone.

Muon orthogonalises the momentum of a matrix. With ``--muon-tp-mode blockwise`` each tensor-parallel
rank does so with its own shard (``TensorParallelMuon.orthogonalize`` in
megatron/core/optimizer/emerging_optimizers.py). A reference that has whole matrices does the same
with each of its candidate's shards (``blocks.py``). Adaptive Muon and SOAP also keep a state of
each shard, so their updates differ from a single device's by design. So do updates of weights that
ranks gather: which rows a rank has depends on padding, and 0.19's Muon gathers them first.
"""

from collections.abc import Sequence

from megatron_ttrace.mcore.arguments import MegatronArguments
from megatron_ttrace.mcore.roles import is_shared_embedding
from megatron_ttrace.mcore.sharded_weights import SHARDS_OF_WEIGHTS
from megatron_ttrace.trace.records import Kind

_TENSOR_PARALLEL = ("tensor_model_parallel_size", "expert_tensor_parallel_size")


def depends_on_layout(args: MegatronArguments) -> tuple[tuple[Kind, ...], str]:
    """What of a matrix's update differs in this layout by design, and because of which option.

    Returns:
        Kinds of tensors (of ``param`` that after the step), and the option; ``()`` and ``""`` where
        every rank steps whole matrices.
    """
    name = _optimizer(args)
    if all(_size(args, size) == 1 for size in (*_TENSOR_PARALLEL, *SHARDS_OF_WEIGHTS)):
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


def ranks_of_blocks(args: MegatronArguments) -> list[int]:
    """Over how many ranks of tp and of etp a reference steps matrices in blocks; 1 for none."""
    is_muon = _optimizer(args) == "muon" and depends_on_layout(args)[1]
    in_blocks = is_muon and all(_size(args, size) == 1 for size in SHARDS_OF_WEIGHTS)
    return [_size(args, size) if in_blocks else 1 for size in _TENSOR_PARALLEL]


def _optimizer(args: MegatronArguments) -> str:
    return str(getattr(args, "optimizer", "")).removeprefix("dist_")


def _size(args: MegatronArguments, name: str) -> int:
    return getattr(args, name, 1) or 1
