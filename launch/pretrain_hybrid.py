# SPDX-License-Identifier: Apache-2.0
"""Pretrain a hybrid model: Mamba, attention, MLP and expert layers in any order.

As ``pretrain_gpt.py`` beside it, with ``--hybrid-layer-pattern M-M*`` and the specification of the
layers: ``--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec``.
"""

import megatron_ttrace

megatron_ttrace.enable()  # before Megatron is imported: it may have to run without CUDA

from typing import Any

import pretrain_gpt
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.spec_utils import import_module
from megatron.training import get_args
from megatron.training.arguments import core_transformer_config_from_args


def provide_model(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> Any:
    """Build one pipeline stage of the model, for releases before 0.19 (0.19 builds its own)."""
    args = get_args()
    return HybridModel(
        config=config or core_transformer_config_from_args(args),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        hybrid_layer_pattern=args.hybrid_layer_pattern,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
        hybrid_stack_spec=import_module(args.spec),
    )


def main() -> None:
    """Start Megatron's training loop with such a model."""
    pretrain_gpt.main(provide_model, "hybrid_config_from_args")


if __name__ == "__main__":
    main()
