# SPDX-License-Identifier: Apache-2.0
"""The common location in Megatron of each sort of fault: where to start looking.

The first place that fits is used; an empty field fits everything. Files and functions are those of
megatron-core 0.19; a test looks each of them up in the installed release.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
import re
from pathlib import Path

from megatron_ttrace.trace.findings import FACTORS, Cause, Finding
from megatron_ttrace.trace.records import Direction, Kind, Outcome, Verdict

_GRADIENT = (Kind.MAIN_GRAD,)
_ACTIVATION = (Kind.INPUT, Kind.OUTPUT)
_BACKWARD = (Kind.GRAD_INPUT, Kind.GRAD_OUTPUT)
_UPDATE = (Kind.PARAM_DELTA, Kind.EXP_AVG, Kind.EXP_AVG_SQ, Kind.PARAM)

_LONGEST = 1000
"""Characters of a name that are searched; a name from a file may be longer."""

_NORM = r"layer_norm_|(layernorm|norm)\."
_EMBEDDING = r"^embedding\.|^output_layer"
_COLUMN = r"linear_(qkv|fc1|q|kv)\b|^output_layer"
_ROW = r"linear_(proj|fc2)\b"


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A function of Megatron, and the faults for which it is the common location.

    ``where`` is ``file:function``, the file relative to the package ``megatron``.
    """

    where: str
    causes: tuple[Cause, ...] = ()
    kinds: tuple[Kind, ...] = ()
    name: str = ""
    axes: tuple[str, ...] = ()

    def fits(self, finding: Finding, tensor: Verdict) -> bool:
        """Whether a finding about a tensor belongs here."""
        return (
            (not self.causes or finding.cause in self.causes)
            and (not self.kinds or tensor.kind in self.kinds)
            and (not self.name or re.search(self.name, tensor.name[:_LONGEST]) is not None)
            and (not self.axes or bool(set(self.axes) & set(finding.axes)))
        )


_FINALIZE = "core/distributed/finalize_model_grads.py"
_BUFFER = "core/distributed/param_and_grad_buffer.py"
_DDP = "core/distributed/distributed_data_parallel.py"
_ZERO = "core/optimizer/distrib_optimizer.py"
_SCHEDULES = "core/pipeline_parallel/schedules.py"
_LAYERS = "core/tensor_parallel/layers.py"
_REDUCE = "core/tensor_parallel/mappings.py:reduce_from_tensor_model_parallel_region"
_P2P = "core/pipeline_parallel/p2p_communication.py:P2PCommunicator"
_TE = "core/extensions/transformer_engine.py"
_ATTENTION = "core/transformer/dot_product_attention.py:DotProductAttention"
_ROTARY = "core/models/common/embeddings/rope_utils.py:get_pos_emb_on_this_cp_rank"
_MOE = "core/transformer/moe"
_NORM_LAYER = "core/fusions/fused_layer_norm.py:FusedLayerNorm"
_CROSS_ENTROPY = "core/tensor_parallel/cross_entropy.py:VocabParallelCrossEntropy"
_LINEAR = f"{_LAYERS}:LinearWithGradAccumulationAndAsyncCommunication"
_NON_TENSOR = f"{_FINALIZE}:_allreduce_non_tensor_model_parallel_grads"
_EMBEDDINGS = f"{_FINALIZE}:_allreduce_word_embedding_grads"
_LOSS = f"{_SCHEDULES}:forward_step_calc_loss"

PLACES = (
    Place("core/tensor_parallel/random.py:model_parallel_cuda_manual_seed", (Cause.RANDOM_STATE,)),
    Place(f"{_BUFFER}:_ParamAndGradBuffer", (Cause.INITIAL_VALUES,)),
    Place("core/transformer/transformer_block.py:get_num_layers_to_build", (Cause.LAYERS,)),
    Place("core/optimizer/__init__.py:_get_param_groups_and_buffers", (Cause.ZERO,), _UPDATE),
    Place(f"{_DDP}:_make_backward_post_hook", (Cause.ZERO,), _GRADIENT),
    Place(f"{_FINALIZE}:finalize_model_grads", (Cause.WEIGHTS,)),
    Place(_EMBEDDINGS, (), _GRADIENT, _EMBEDDING, ("pp",)),
    Place(
        f"{_FINALIZE}:_allreduce_router_grads", (Cause.PARTIAL,), _GRADIENT, r"router\.", ("pp",)
    ),
    Place(_NON_TENSOR, (Cause.PARTIAL, *FACTORS), _GRADIENT, _NORM + r"|router\.|bias$", ("tp",)),
    Place(_NON_TENSOR, (Cause.PARTIAL,), _GRADIENT, "", ("tp",)),
    Place(f"{_BUFFER}:start_grad_sync", (Cause.PARTIAL,), _GRADIENT, "", ("dp", "cp", "edp")),
    Place(_LOSS, FACTORS, (*_GRADIENT, *_BACKWARD), "", ("cp", "microbatches")),
    Place(f"{_BUFFER}:start_grad_sync", FACTORS, _GRADIENT, "", ("dp", "edp")),
    Place(f"{_LAYERS}:VocabParallelEmbedding", (Cause.TOKEN_IDS,)),
    Place(f"{_LAYERS}:VocabParallelEmbedding", (), _ACTIVATION, r"word_embeddings", ("tp",)),
    Place(_LINEAR, (Cause.OPERAND,)),
    Place(_REDUCE, (Cause.PARTIAL,), _ACTIVATION, "", ("tp",)),
    Place(_LINEAR, (Cause.PARTIAL,), _BACKWARD, "", ("tp",)),
    Place(f"{_LAYERS}:RowParallelLinear", (Cause.ADDEND,), (), _ROW),
    Place("core/fusions/fused_bias_dropout.py:_bias_dropout_add_func", (Cause.ADDEND,)),
    Place("core/transformer/mlp.py:MLP", (Cause.HALVES,)),
    Place(
        "core/recompute.py:checkpointed_forward",
        (Cause.OTHER_MODULE,),
        _ACTIVATION,
        r"^decoder\.layers\.\d+$",
    ),
    Place(_P2P, (Cause.OTHER_TIME,), (*_ACTIVATION, *_BACKWARD)),
    Place(
        f"{_ZERO}:_build_model_gbuf_param_range_map",
        (Cause.OFFSET, Cause.ROWS, Cause.ORDER, Cause.COPY),
        _UPDATE,
    ),
    Place(f"{_BUFFER}:finish_grad_sync", (Cause.COPY, Cause.ROWS, Cause.OTHER_TIME), _GRADIENT),
    Place("core/utils.py:get_batch_on_this_cp_rank", (Cause.OFFSET, Cause.ORDER), (), "", ("cp",)),
    Place(_ROTARY, (Cause.OFFSET, Cause.ORDER, Cause.ROWS), (), "rotary"),
    Place(f"{_TE}:TEDotProductAttention", (), (), r"core_attention", ("cp",)),
    Place(_ATTENTION, (), (), r"core_attention"),
    Place(f"{_MOE}/router.py:TopKRouter", (), (), r"router\b"),
    Place(f"{_MOE}/token_dispatcher.py:MoEAlltoAllTokenDispatcher", (), (), r"\.experts\b"),
    Place("core/optimizer/clip_grads.py:get_grad_norm_fp32", (), (Kind.GRAD_NORM,)),
    Place(_LOSS, (), (Kind.LOSS,)),
    Place(_CROSS_ENTROPY, (), (), r"^model$", ("tp",)),
    Place(f"{_TE}:TELinear", (Cause.PRECISION,), (), r"linear_"),
    Place(f"{_TE}:TELayerNormColumnParallelLinear", (Cause.CAST,), (), _COLUMN),
    Place(f"{_TE}:TELinear", (Cause.CAST,)),
    Place(f"{_LAYERS}:ColumnParallelLinear", (), (*_ACTIVATION, *_BACKWARD, *_GRADIENT), _COLUMN),
    Place(f"{_LAYERS}:RowParallelLinear", (), (*_ACTIVATION, *_BACKWARD, *_GRADIENT), _ROW),
    Place(_NORM_LAYER, (), (), _NORM + r"|norm$"),
    Place(f"{_ZERO}:DistributedOptimizer", (), _UPDATE),
    Place(f"{_FINALIZE}:finalize_model_grads", (), _GRADIENT),
)


MODULES = (
    (r"(^|\.)word_embeddings", f"{_LAYERS}:VocabParallelEmbedding"),
    (
        r"(^|\.)embedding",
        "core/models/common/embeddings/language_model_embedding.py:LanguageModelEmbedding",
    ),
    (r"core_attention", _ATTENTION),
    (r"(self|cross)_attention", "core/transformer/attention.py:Attention"),
    (r"router", f"{_MOE}/router.py:TopKRouter"),
    (r"experts", f"{_MOE}/token_dispatcher.py:MoETokenDispatcher"),
    (r"layernorm|(^|\.)norm", "core/transformer/torch_norm.py:WrappedTorchNorm"),
    (r"(^|\.)mlp", "core/transformer/mlp.py:MLP"),
    (r"output_layer", f"{_LAYERS}:ColumnParallelLinear"),
    (r"layers\.\d+$", "core/transformer/transformer_layer.py:TransformerLayer"),
)
"""The code of a module, by its name: where to look if nothing else is known."""

_LOADER = "get_batch() of the training script"
_STAGES = "core/transformer/transformer_block.py:get_num_layers_to_build"
_MARKS = f"{_LAYERS}:param_is_not_tensor_parallel_duplicate"
_LOG = "training/training.py:training_log"
_OPTIMIZER = "core/optimizer/optimizer.py:MegatronOptimizer"


def location(tensor: Verdict, finding: Finding | None = None) -> str:
    """``function in megatron/file:line``, where to look for the cause of a failure.

    The line is that of the installed Megatron, if there is one. Empty if there is no common
    location for such a fault.
    """
    if finding is not None:
        for place in PLACES:
            if place.fits(finding, tensor):
                return _shown(place.where)
    if tensor.kind is Kind.TOKENS:
        return _LOADER
    return _shown(_of_tensor(tensor))


def _of_tensor(tensor: Verdict) -> str:
    if tensor.kind in (Kind.COUNTED, Kind.METRIC):
        return _MARKS if tensor.kind is Kind.COUNTED else _LOG
    if tensor.verdict in (Outcome.MISSING, Outcome.EXTRA):
        return _STAGES
    if tensor.direction is Direction.UPDATE:
        return _OPTIMIZER
    if tensor.direction is Direction.GRADIENT:
        return f"{_FINALIZE}:finalize_model_grads"
    name = tensor.name[:_LONGEST]
    return next((where for pattern, where in MODULES if re.search(pattern, name)), "")


def _shown(where: str) -> str:
    if not where:
        return ""
    file, _, function = where.partition(":")
    line = _lines(file).get(function)
    return f"{function} in megatron/{file}" + (f":{line}" if line else "")


@functools.cache
def _lines(file: str) -> dict[str, int]:
    """Line of each function and class of a file of the installed Megatron."""
    try:
        found = importlib.util.find_spec("megatron.core")
        if found is None or found.origin is None:
            return {}
        source = (Path(found.origin).parent.parent / file).read_text(encoding="utf-8")
        nodes = list(ast.walk(ast.parse(source)))
    except (ImportError, OSError, ValueError, SyntaxError):
        return {}
    kinds = ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef
    return {node.name: node.lineno for node in reversed(nodes) if isinstance(node, kinds)}
