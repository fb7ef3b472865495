# SPDX-License-Identifier: Apache-2.0
"""Small configurations of Megatron-Bridge, as its users' scripts make them."""

from __future__ import annotations

from data import LENGTH
from megatron.bridge.recipes.utils.optimizer_utils import (
    distributed_fused_adam_with_cosine_annealing,
)
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    LoggerConfig,
    MockGPTDatasetConfig,
    RNGConfig,
    TokenizerConfig,
    TrainingConfig,
    ValidationConfig,
)


def configuration(model, **others):
    """Two iterations of four samples."""
    optimizer, scheduler = distributed_fused_adam_with_cosine_annealing(
        lr_warmup_iters=1, lr_decay_iters=2, max_lr=1e-3, min_lr=1e-4
    )
    model.seq_length = LENGTH
    parts = {
        "model": model,
        "train": TrainingConfig(train_iters=2, global_batch_size=4, micro_batch_size=1),
        "validation": ValidationConfig(eval_interval=None, eval_iters=0),
        "optimizer": optimizer,
        "scheduler": scheduler,
        "ddp": DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            use_distributed_optimizer=True,
        ),
        "dataset": MockGPTDatasetConfig(
            random_seed=1234,
            reset_attention_mask=False,
            reset_position_ids=False,
            eod_mask_loss=False,
            seq_length=LENGTH,
            num_dataset_builder_threads=1,
            dataloader_type="single",
        ),
        "logger": LoggerConfig(log_interval=1),
        "tokenizer": TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=126),
        "checkpoint": CheckpointConfig(),
        "rng": RNGConfig(seed=1234),
        "mixed_precision": "bf16_mixed",
    }
    return ConfigContainer(**{**parts, **others})
