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


def provide_model(config: Any = None, **stage: Any) -> HybridModel:
    """Build one pipeline stage of the model, for releases before 0.19 (0.19 builds its own)."""
    args = get_args()
    return HybridModel(
        hybrid_layer_pattern=args.hybrid_layer_pattern,
        hybrid_stack_spec=import_module(args.spec),
        **stage,
        **pretrain_gpt.model_arguments(config),
    )


def main() -> None:
    """Start Megatron's training loop with such a model."""
    pretrain_gpt.main(provide_model, "hybrid_config_from_args")


if __name__ == "__main__":
    main()
