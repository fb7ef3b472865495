# SPDX-License-Identifier: Apache-2.0
"""Megatron-Bridge without its user's files: other data, nothing loaded or saved."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from megatron_ttrace.mcore.fronts.bridge_options import Options
from megatron_ttrace.trace.errors import TTraceError

_DTYPES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
_SWITCHES = (
    *("use_precision_aware_optimizer", "cross_entropy_loss_fusion"),
    "moe_pad_expert_input_to_capacity",
)
VOCABULARY = 128
START = "start"
"""In the data's folder: what stands for the checkpoint that adapters are trained on."""


def resolve(cfg: Any) -> None:
    """Replace the name of a precision by what it stands for, as ``runtime_config_update`` does."""
    if isinstance(cfg.mixed_precision, str):
        precision = importlib.import_module("megatron.bridge.training.mixed_precision")
        cfg.mixed_precision = precision.get_mixed_precision_config(cfg.mixed_precision)


def require_text(cfg: Any) -> bool:
    """Whether a model is fine-tuned on text.

    Raises:
        TTraceError: when it is not trained on text, which is what replaces its data.
    """
    kinds = importlib.import_module("megatron.bridge.training.config")
    if not isinstance(cfg.dataset, kinds.GPTDatasetConfig | kinds.GPTSFTDatasetConfig):
        raise TTraceError(
            f"{type(cfg.dataset).__name__}: only jobs on GPTDatasetConfig and GPTSFTDatasetConfig "
            "can be made small: what replaces their data is text"
        )
    return isinstance(cfg.dataset, kinds.GPTSFTDatasetConfig)


def detach(cfg: Any, data: Path, iterations: int) -> None:
    """Train some iterations on other data; nothing is loaded, saved or logged.

    The model is small already. ``data`` is a folder with conversations, prompts and their tokenizer
    (jobs/shrink/documents.py).

    Raises:
        TTraceError: as :func:`require_text`.
    """
    is_tuned = require_text(cfg)
    tokens = cfg.model.vocab_size
    for name, value in vars(cfg.model).items():
        # Some models have further tables of the same size.
        if value == tokens and isinstance(value, int) and value > VOCABULARY:
            setattr(cfg.model, name, VOCABULARY)
    # Not all models pad all tables, and Gemma 4 pads to the same multiple for any number of ranks
    # (megatron/bridge/models/gemma/gemma4_provider.py): this vocabulary needs no padding.
    cfg.model.make_vocab_size_divisible_by = VOCABULARY // cfg.model.tensor_model_parallel_size
    cfg.tokenizer.vocab_size = VOCABULARY - 2
    cfg.dataset.num_workers = 0
    cfg.dataset.persistent_workers = False
    if is_tuned:
        _tune(cfg, data)
    else:
        cfg.tokenizer.tokenizer_type = "NullTokenizer"
        cfg.tokenizer.tokenizer_model = None
        cfg.dataset.blend = cfg.dataset.blend_per_split = None
    cfg.train.train_iters = iterations
    cfg.train.train_samples = None
    schedule = cfg.scheduler
    schedule.lr_warmup_iters = schedule.lr_warmup_samples = 0
    schedule.lr_decay_iters = schedule.lr_decay_samples = schedule.lr_warmup_fraction = None
    schedule.lr_wsd_decay_iters = 1 if schedule.lr_decay_style == "WSD" else None
    cfg.validation.eval_iters = 0
    cfg.logger.log_interval = 1
    cfg.logger.tensorboard_dir = cfg.logger.wandb_project = None
    cfg.checkpoint.save = cfg.checkpoint.load = cfg.checkpoint.pretrained_checkpoint = None
    cfg.checkpoint.async_save = False
    if cfg.peft is not None:
        # The weights of a checkpoint would only be other start values.
        cfg.checkpoint.pretrained_checkpoint = str(data / START)
        setup: Any = importlib.import_module("megatron.bridge.training.setup")
        setup.checkpoint_exists = lambda *_, **__: True
        setup._load_checkpoint_from_path = lambda *_, **__: None


def make_plain(cfg: Any) -> None:
    """Compute in float32, without what no model of ``transformers`` is compared with."""
    torch: Any = importlib.import_module("torch")
    precision: Any = importlib.import_module("megatron.bridge.training.mixed_precision")
    options = Options(cfg)
    dtypes = dict.fromkeys(("params_dtype", "pipeline_dtype", "autocast_dtype"), torch.float32)
    cfg.mixed_precision = precision.MixedPrecisionConfig(fp32=True, **dtypes)
    off: dict[str, Any] = dict.fromkeys(_DTYPES, torch.float32) | {"moe_aux_loss_coeff": 0.0}
    off |= dict.fromkeys(("moe_z_loss_coeff", "moe_expert_capacity_factor", "mtp_num_layers"))
    off |= dict.fromkeys(_SWITCHES, False)
    for option, value in off.items():
        setattr(options, option, value)


def _tune(cfg: Any, data: Path) -> None:
    cfg.tokenizer.tokenizer_type = "HuggingFaceTokenizer"
    cfg.tokenizer.tokenizer_model = str(data)
    cfg.tokenizer.hf_tokenizer_kwargs = {}
    dataset = cfg.dataset
    dataset.hf_dataset = dataset.hf_validation_dataset = dataset.hf_test_dataset = None
    dataset.hf_validation_proportion = dataset.hf_output_root = None
    is_chat = type(dataset.preprocessing).__name__.startswith("Chat")
    dataset.dataset_root = data / ("chat" if is_chat else "prompt")
    dataset.do_validation = dataset.do_test = False
    if (rows := dataset.offline_packing_specs) is not None:
        if rows.max_single_sequence_length is not None:
            # The rest of a row is room for what its last sample is padded by.
            most = rows.max_single_sequence_length * dataset.seq_length
            rows.max_single_sequence_length = most // rows.packed_sequence_size
        rows.packed_sequence_size = dataset.seq_length
