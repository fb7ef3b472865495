# SPDX-License-Identifier: Apache-2.0
"""The types of those of Megatron's validated arguments that a traced run reads.

Only arguments that all supported releases have are listed. Others are read by ``getattr`` with a
default.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # reading a report needs no torch
    import torch


class MegatronArguments(Protocol):
    """``megatron.training.get_args()`` after validation, as far as a traced run reads it."""

    # Sizes.
    num_layers: int
    hidden_size: int
    seq_length: int
    num_experts: int | None
    micro_batch_size: int
    global_batch_size: int
    train_iters: int | None
    eval_interval: int | None
    rampup_batch_size: list[str] | list[int] | None
    make_vocab_size_divisible_by: int
    # Layout.
    tensor_model_parallel_size: int
    context_parallel_size: int
    data_parallel_size: int
    virtual_pipeline_model_parallel_size: int | None
    sequence_parallel: bool
    use_distributed_optimizer: bool
    overlap_grad_reduce: bool
    moe_token_dispatcher_type: str
    # Arithmetic.
    bf16: bool
    params_dtype: torch.dtype
    lr: float
    clip_grad: float
    seed: int
    hidden_dropout: float
    attention_dropout: float
    calculate_per_token_loss: bool
    untie_embeddings_and_output_weights: bool
    # Where it starts, and its position in the data.
    load: str | None
    iteration: int
    consumed_train_samples: int
    num_floating_point_operations_so_far: float
    save_interval: int | None
    # What is logged.
    log_params_norm: bool
    log_num_zeros_in_grad: bool


class ModelConfig(Protocol):
    """``TransformerConfig``, as far as start values depend on it."""

    num_layers: int
    init_method_std: float


class Optimizer(Protocol):
    """``MegatronOptimizer``, as far as it is called here (``mcore/optimizer.py`` reads it)."""

    def reload_model_params(self) -> None:
        """Copy the model's parameters to the main parameters."""


class Scheduler(Protocol):
    """Megatron's ``OptimizerParamScheduler``, as far as a traced run uses it."""

    num_steps: int

    def step(self, increment: int) -> None:
        """Advance by a number of samples, and set the learning rate."""

    def state_dict(self) -> dict[str, float | str]:
        """What a checkpoint keeps of it."""
