# SPDX-License-Identifier: Apache-2.0
"""``job.py MODEL [PART ...] [SECTION.FIELD=VALUE ...]``: a small job of Megatron-Bridge.

MODEL is ``gpt``, ``llama``, ``qwen3``, ``gemma``, ``experts``, or a recipe. PARTs: ``sft``,
``packed``, ``direct``, ``in-batch`` (fine-tuning on ``data.py``'s files in the directory ``data``),
``lora``, ``counted-once`` (with it), ``dora``, ``fp32``, ``plain`` (no distributed optimizer),
``epsilon`` (of all norms the configuration's), ``bounds`` (of packed samples, where the releases
lose them), ``one`` (a recipe's layout becomes one rank). Fields are set last, as command-line
overrides of recipes are.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import sys
from pathlib import Path
from typing import Any

from common import configuration
from data import LENGTH, SMALL
from megatron.bridge import AutoBridge
from megatron.bridge.data.builders.direct_hf_sft import DirectHFSFTDatasetConfig
from megatron.bridge.data.builders.gpt_sft import GPTSFTDatasetConfig
from megatron.bridge.data.packing import PackedSequenceSpecs
from megatron.bridge.data.sft_processing import PromptCompletionSFTPreprocessingConfig
from megatron.bridge.data.sources.hf import HFDatasetSourceConfig
from megatron.bridge.models.common import te_layers
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.peft.dora import DoRA
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.training import gpt_step
from megatron.bridge.training.config import ConfigContainer, TokenizerConfig
from megatron.bridge.training.finetune import finetune
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel_state import get_expert_model_parallel_rank
from megatron.core.transformer import multi_token_prediction
from transformers import (
    Gemma3TextConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

TUNED = ("sft", "packed", "direct", "in-batch")
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
WINDOW = {"head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 24}


def small(name: str) -> PretrainedConfig:
    """A configuration of ``transformers``; one that nobody asks a hub for."""
    if "a3b" in name or name == "experts":
        named = ["Qwen3MoeForCausalLM"]
        return Qwen3MoeConfig(**SMALL, **EXPERTS, head_dim=16, architectures=named)
    if "qwen3" in name:
        return Qwen3Config(**SMALL, head_dim=16, architectures=["Qwen3ForCausalLM"])
    if name == "gemma":
        kinds = ["sliding_attention", "full_attention"]
        return Gemma3TextConfig(
            **SMALL, **WINDOW, layer_types=kinds, architectures=["Gemma3ForCausalLM"]
        )
    return LlamaConfig(**SMALL, architectures=["LlamaForCausalLM"])


def provider(name: str) -> Any:
    """The model of a job that is no recipe's."""
    if name == "gpt":
        return GPTModelProvider(
            num_layers=2,
            hidden_size=64,
            ffn_hidden_size=128,
            num_attention_heads=4,
            vocab_size=128,
            make_vocab_size_divisible_by=16,
        )
    return AutoBridge.from_hf_config(small(name)).to_megatron_provider(load_weights=False)


def recipe(name: str) -> ConfigContainer:
    """A recipe, made small."""
    AutoBridge.from_hf_pretrained = lambda path, **_: AutoBridge.from_hf_config(small(name))
    family = "qwen" if name.startswith("qwen") else "llama"
    module = importlib.import_module(f"megatron.bridge.recipes.{family}")
    cfg = getattr(module, name)()
    cfg.model.seq_length = cfg.dataset.seq_length = LENGTH
    cfg.model.vocab_size = 128
    cfg.tokenizer = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=126)
    cfg.train.train_iters, cfg.train.global_batch_size = 2, 4
    cfg.train.micro_batch_size = 1
    cfg.scheduler.lr_warmup_iters = 1
    cfg.validation.eval_iters = 0
    cfg.logger.log_interval, cfg.logger.tensorboard_dir = 1, None
    cfg.checkpoint.save = cfg.checkpoint.load = None
    return cfg


def tuned(kind: str) -> dict[str, Any]:
    """What fine-tuning replaces."""
    home = Path("data").resolve()
    common = {"seq_length": LENGTH, "do_validation": False, "do_test": False, "num_workers": 0}
    if kind in ("direct", "in-batch"):
        file = str(home / "training.jsonl")
        data = DirectHFSFTDatasetConfig(
            **common,
            source=HFDatasetSourceConfig(path_or_dataset="json", load_kwargs={"data_files": file}),
            preprocessing=PromptCompletionSFTPreprocessingConfig(
                prompt_column="input", completion_column="output", separator=" "
            ),
            dataloader_type="single",
            pad_to_multiple_of=4,
            enable_in_batch_packing=kind == "in-batch",
        )
    else:
        data = GPTSFTDatasetConfig(**common, dataset_root=home)
    if kind == "packed":
        data.enable_offline_packing = True
        data.offline_packing_specs = PackedSequenceSpecs(
            packed_sequence_size=LENGTH, pad_seq_to_mult=4
        )
    tokenizer = TokenizerConfig(
        tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(home / "tokenizer")
    )
    return {"dataset": data, "tokenizer": tokenizer}


class CountedOnce(LoRA):
    """Adapters that all experts share are in a gradient norm once (finding 42)."""

    def transform(self, module: Any, name: str | None = None, prefix: str | None = None) -> Any:
        """Mark the copies, as those of shared embeddings are."""
        found = super().transform(module, name, prefix)
        adapter = getattr(found, "adapter", None)
        if getattr(adapter, "is_expert", False) and get_expert_model_parallel_rank():
            for parameter in adapter.parameters():
                parameter.shared = True
        return found


def keep_bounds() -> None:
    """Give schedule plans the bounds of packed samples (finding 50), MTP the padded ones (51)."""
    params, plan = gpt_step.get_packed_seq_params, GPTModel.build_schedule_plan
    roll = multi_token_prediction._roll_tensor_packed_seq
    latest: list[Any] = []

    def remembered(batch: Any) -> Any:
        latest[:] = [params(batch)]
        return latest[0]

    def planned(self: GPTModel, *args: Any, **kwargs: Any) -> Any:
        return plan(self, *args, **kwargs, packed_seq_params=latest[0])

    def rolled(tensor: Any, shifts: int, dims: int, packed: Any, group: Any = None) -> Any:
        padded = dataclasses.replace(packed, cu_seqlens_q=packed.cu_seqlens_q_padded)
        return roll(tensor, shifts, dims, padded, group)

    gpt_step.get_packed_seq_params, GPTModel.build_schedule_plan = remembered, planned
    multi_token_prediction._roll_tensor_packed_seq = rolled


def assign(cfg: Any, word: str) -> None:
    """Set ``SECTION.FIELD=VALUE``."""
    path, _, text = word.partition("=")
    *outer, name = path.split(".")
    owner = functools.reduce(getattr, outer, cfg)
    if not hasattr(owner, name):
        sys.exit(f"{path}: there is no such field")
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        value = text
    setattr(owner, name, value)


def main(name: str, *words: str) -> None:
    """Train."""
    parts = [word for word in words if "=" not in word]
    others = next((tuned(part) for part in parts if part in TUNED), {})
    if name.endswith("_config"):
        cfg = recipe(name)
        for section, value in others.items():
            setattr(cfg, section, value)
    else:
        cfg = configuration(provider(name), **others)
    if "lora" in parts:
        cfg.peft = (CountedOnce if "counted-once" in parts else LoRA)(dim=4, alpha=8)
    if "dora" in parts:
        cfg.peft = DoRA(dim=4, alpha=8)
    if "epsilon" in parts:  # finding 49
        te_layers.TENorm = functools.partial(te_layers.TENorm, eps=cfg.model.layernorm_epsilon)
    if "bounds" in parts:
        keep_bounds()
    if "fp32" in parts:
        cfg.mixed_precision = None
    if "plain" in parts:
        for owner in (cfg.ddp, cfg.optimizer):
            owner.use_distributed_optimizer = owner.overlap_param_gather = False
        cfg.ddp.overlap_grad_reduce = False
    if "one" in parts:
        model = cfg.model
        model.tensor_model_parallel_size = model.pipeline_model_parallel_size = 1
        model.context_parallel_size = model.expert_model_parallel_size = 1
        model.virtual_pipeline_model_parallel_size = model.pipeline_model_parallel_layout = None
        model.sequence_parallel, model.cuda_graph_impl = False, "none"
        cfg.comm_overlap = None
    for word in words:
        if "=" in word:
            assign(cfg, word)
    begin = pretrain if cfg.checkpoint.pretrained_checkpoint is None else finetune
    begin(cfg, forward_step)


if __name__ == "__main__":
    main(*sys.argv[1:])
