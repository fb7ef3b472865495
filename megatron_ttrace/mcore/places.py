# SPDX-License-Identifier: Apache-2.0
"""The usual place in Megatron for each sort of fault: where to begin to look.

First line that fits wins; an empty column fits everything. The files and functions are those of
megatron-core 0.19; a test looks each of them up in the installed one.
"""

from __future__ import annotations

import dataclasses
import re

from megatron_ttrace.trace.findings import Finding
from megatron_ttrace.trace.records import Kind, TraceKey

_GRADIENT = (Kind.MAIN_GRAD,)
_ACTIVATION = (Kind.INPUT, Kind.OUTPUT)
_BACKWARD = (Kind.GRAD_INPUT, Kind.GRAD_OUTPUT)
_UPDATE = (Kind.PARAM_DELTA, Kind.EXP_AVG, Kind.EXP_AVG_SQ, Kind.PARAM)

_NORM = r"layer_norm_|(layernorm|norm)\."
_EMBEDDING = r"^embedding\.|^output_layer"
_COLUMN = r"linear_(qkv|fc1|q|kv)\b|^output_layer"
_ROW = r"linear_(proj|fc2)\b"


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A function of Megatron and the faults that it is the usual place of.

    ``where`` is ``file:function``, the file relative to the package ``megatron``.
    """

    where: str
    causes: tuple[str, ...] = ()
    kinds: tuple[Kind, ...] = ()
    name: str = ""
    axes: tuple[str, ...] = ()

    def fits(self, finding: Finding, key: TraceKey) -> bool:
        """Whether a finding about a tensor belongs here."""
        return (
            (not self.causes or finding.cause in self.causes)
            and (not self.kinds or key.kind in self.kinds)
            and (not self.name or re.search(self.name, key.name) is not None)
            and (not self.axes or bool(set(self.axes) & set(finding.axis.split("+"))))
        )


_FINALIZE = "core/distributed/finalize_model_grads.py"
_LAYERS = "core/tensor_parallel/layers.py"
_MAPPINGS = "core/tensor_parallel/mappings.py"
_BUFFER = "core/distributed/param_and_grad_buffer.py"

PLACES = (
    Place("core/tensor_parallel/random.py:model_parallel_cuda_manual_seed", ("random state",)),
    Place(f"{_BUFFER}:_ParamAndGradBuffer", ("initial values",)),
    Place("core/transformer/transformer_block.py:get_num_layers_to_build", ("layers",)),
    Place("core/optimizer/__init__.py:_get_param_groups_and_buffers", ("zero",), _UPDATE),
    Place(
        "core/distributed/distributed_data_parallel.py:_make_backward_post_hook",
        ("zero",),
        _GRADIENT,
    ),
    Place(f"{_FINALIZE}:_allreduce_word_embedding_grads", ("tied",)),
    Place(f"{_FINALIZE}:finalize_model_grads", ("weights",)),
    Place(f"{_FINALIZE}:_allreduce_word_embedding_grads", (), _GRADIENT, _EMBEDDING, ("pp",)),
    Place(f"{_FINALIZE}:_allreduce_router_grads", ("partial",), _GRADIENT, r"router\.", ("pp",)),
    Place(
        f"{_FINALIZE}:_allreduce_non_tensor_model_parallel_grads",
        ("partial", "factor"),
        _GRADIENT,
        _NORM + r"|router\.|bias$",
        ("tp",),
    ),
    Place(
        f"{_FINALIZE}:_allreduce_non_tensor_model_parallel_grads",
        ("partial",),
        _GRADIENT,
        "",
        ("tp",),
    ),
    Place(f"{_BUFFER}:start_grad_sync", ("partial",), _GRADIENT, "", ("dp", "cp", "edp")),
    Place(
        "core/pipeline_parallel/schedules.py:forward_step_calc_loss",
        ("factor",),
        (*_GRADIENT, *_BACKWARD),
        "",
        ("cp", "microbatches"),
    ),
    Place(f"{_BUFFER}:start_grad_sync", ("factor",), _GRADIENT, "", ("dp", "edp")),
    Place(f"{_LAYERS}:VocabParallelEmbedding", ("mask",)),
    Place(f"{_LAYERS}:VocabParallelEmbedding", (), _ACTIVATION, r"word_embeddings", ("tp",)),
    Place(f"{_LAYERS}:LinearWithGradAccumulationAndAsyncCommunication", ("operand",)),
    Place(
        f"{_MAPPINGS}:reduce_from_tensor_model_parallel_region",
        ("partial",),
        _ACTIVATION,
        "",
        ("tp",),
    ),
    Place(
        f"{_LAYERS}:LinearWithGradAccumulationAndAsyncCommunication",
        ("partial",),
        _BACKWARD,
        "",
        ("tp",),
    ),
    Place(f"{_LAYERS}:RowParallelLinear", ("addend",), (), _ROW),
    Place("core/fusions/fused_bias_dropout.py:_bias_dropout_add_func", ("addend",)),
    Place("core/transformer/mlp.py:MLP", ("halves",)),
    Place(
        "core/recompute.py:checkpointed_forward",
        ("module",),
        _ACTIVATION,
        r"^decoder\.layers\.\d+$",
    ),
    Place(
        "core/pipeline_parallel/p2p_communication.py:P2PCommunicator",
        ("time",),
        (*_ACTIVATION, *_BACKWARD),
    ),
    Place(
        "core/optimizer/distrib_optimizer.py:_build_model_gbuf_param_range_map",
        ("offset", "rows", "order", "copy"),
        _UPDATE,
    ),
    Place(f"{_BUFFER}:finish_grad_sync", ("copy", "rows", "time"), _GRADIENT),
    Place("core/utils.py:get_batch_on_this_cp_rank", ("offset", "order"), (), "", ("cp",)),
    Place(
        "core/models/common/embeddings/rope_utils.py:get_pos_emb_on_this_cp_rank",
        ("offset", "order", "rows"),
        (),
        "rotary",
    ),
    Place(
        "core/extensions/transformer_engine.py:TEDotProductAttention",
        (),
        (),
        r"core_attention",
        ("cp",),
    ),
    Place(
        "core/transformer/dot_product_attention.py:DotProductAttention", (), (), r"core_attention"
    ),
    Place("core/transformer/moe/router.py:TopKRouter", (), (), r"router\b"),
    Place(
        "core/transformer/moe/token_dispatcher.py:MoEAlltoAllTokenDispatcher",
        (),
        (),
        r"\.experts\b",
    ),
    Place("core/optimizer/clip_grads.py:get_grad_norm_fp32", (), (Kind.GRAD_NORM,)),
    Place("core/pipeline_parallel/schedules.py:forward_step_calc_loss", (), (Kind.LOSS,)),
    Place(
        "core/tensor_parallel/cross_entropy.py:VocabParallelCrossEntropy",
        (),
        (),
        r"^model$",
        ("tp",),
    ),
    Place("core/extensions/transformer_engine.py:TELinear", ("precision",), (), r"linear_"),
    Place(
        "core/extensions/transformer_engine.py:TELayerNormColumnParallelLinear",
        ("cast",),
        (),
        _COLUMN,
    ),
    Place("core/extensions/transformer_engine.py:TELinear", ("cast",)),
    Place(f"{_LAYERS}:ColumnParallelLinear", (), (*_ACTIVATION, *_BACKWARD, *_GRADIENT), _COLUMN),
    Place(f"{_LAYERS}:RowParallelLinear", (), (*_ACTIVATION, *_BACKWARD, *_GRADIENT), _ROW),
    Place("core/fusions/fused_layer_norm.py:FusedLayerNorm", (), (), _NORM + r"|norm$"),
    Place("core/optimizer/distrib_optimizer.py:DistributedOptimizer", (), _UPDATE),
    Place(f"{_FINALIZE}:finalize_model_grads", (), _GRADIENT),
)


def usual_place(finding: Finding, key: TraceKey) -> str:
    """``megatron/file.py, function()``; empty when there is no usual place."""
    for place in PLACES:
        if place.fits(finding, key):
            file, _, function = place.where.partition(":")
            return f"{function} in megatron/{file}"
    return ""
