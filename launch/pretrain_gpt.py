# SPDX-License-Identifier: Apache-2.0
"""Pretrain a GPT model with Megatron-LM's own training loop and its ordinary arguments.

The releases of megatron-core on the package index carry the training loop but no script that
starts it. This is one::

    torchrun --nproc-per-node 4 launch/pretrain_gpt.py <Megatron arguments> --ttrace
"""

import megatron_ttrace

megatron_ttrace.enable()  # before Megatron is imported: it may have to run without CUDA

import dataclasses
import inspect
import json
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core import utils as core_utils
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import (
    GPTDataset,
    GPTDatasetConfig,
    MockGPTDataset,
    MockGPTLowLevelDataset,
)
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import (
    get_gpt_heterogeneous_layer_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tensor_parallel import broadcast_data
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer import multi_token_prediction as mtp
from megatron.core.transformer.spec_utils import import_module
from megatron.training import argument_utils, get_args, get_timers, pretrain, print_rank_0
from megatron.training import training as training_loop
from megatron.training import utils as training_utils
from megatron.training.arguments import (
    core_transformer_config_from_args,
    parse_and_validate_args,
)
from megatron.training.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig
from megatron.training.datasets.sft_dataset import SFTDataset

from megatron_ttrace.mcore.versions import call_known

BATCH_KEYS = (
    "tokens",
    "labels",
    "loss_mask",
    "attention_mask",
    "position_ids",
    "cu_seqlens",
    "cu_seqlens_padded",
    "max_seqlen",
    "local_cp_size",
    "hybrid_cp_group",
)

Batch = dict[str, Any]


# --- data ---------------------------------------------------------------------------------------


def has_mtp(config: Any, vp_stage: int | None) -> bool:
    """Say whether this stage computes multi-token prediction, which needs tokens and labels."""
    return bool(
        mtp.mtp_on_this_rank(
            layout=config.pipeline_model_parallel_layout,
            mtp_num_layers=config.mtp_num_layers,
            ignore_virtual=False,
            vp_stage=vp_stage,
        )
    )


def packs_sequences(args: Namespace) -> bool:
    """Say whether samples carry document boundaries that attention must respect."""
    return bool(args.sft or getattr(args, "dataloader_inter_document_masking", False))


def masks_documents(args: Namespace) -> bool:
    """Say whether the mask that comes with the samples is more than a causal one."""
    return bool(args.reset_attention_mask and args.create_attention_mask_in_dataloader)


def get_batch(data_iterator: Iterator[Batch], vp_stage: int | None = None) -> Batch:
    """Return this rank's part of the next microbatch; absent entries are ``None``."""
    args = get_args()
    with_mtp = has_mtp(core_transformer_config_from_args(args), vp_stage)
    packed = packs_sequences(args)
    computes_tokens = training_utils.is_first_or_last_pipeline_stage(vp_stage) or with_mtp
    if not computes_tokens and not packed:
        # A middle stage has no tokens, but its attention needs the mask of the documents.
        # NVIDIA's script gives it none (docs/findings.md, 40).
        masks = _mask_on_tp_rank(data_iterator) if masks_documents(args) else {}
        return {**dict.fromkeys(BATCH_KEYS), **masks}
    batch = _get_batch_on_tp_rank(data_iterator, with_mtp, packed)
    if not computes_tokens:
        # A middle stage has no tokens, but its attention needs the documents' boundaries.
        kept = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")
        return {key: batch.get(key) if key in kept else None for key in BATCH_KEYS}
    batch = call_known(
        core_utils.get_batch_on_this_cp_rank,
        batch,
        is_hybrid_cp=args.hybrid_context_parallel,
        cp_group=mpu.get_context_parallel_group(),
        hybrid_cp_group_func=mpu.get_hybrid_data_context_parallel_groups,
        use_per_sequence_balancing=packed and not args.sft,
    )
    return {key: batch.get(key) for key in BATCH_KEYS}


def _mask_on_tp_rank(data_iterator: Iterator[Batch]) -> Batch:
    """The attention mask alone: the first tensor-parallel rank reads it for the others."""
    key = "attention_mask"
    read = mpu.get_tensor_model_parallel_rank() == 0
    sample = {key: next(data_iterator)[key].cuda(non_blocking=True)} if read else {}
    masks: Batch = broadcast_data([key], sample, torch.bool)
    return masks


def _get_batch_on_tp_rank(data_iterator: Iterator[Batch], with_mtp: bool, packed: bool) -> Batch:
    args = get_args()
    tp_rank = mpu.get_tensor_model_parallel_rank()
    batch: Batch = {}
    if tp_rank == 0:
        sample = next(data_iterator)
        for key in BATCH_KEYS:
            value = sample.get(key)
            batch[key] = None if value is None else value.cuda(non_blocking=True)
    batch = call_known(
        core_utils.get_batch_on_this_tp_rank,
        batch,
        has_cu_seqlens=packed,
        is_sft=args.sft,
        is_hybrid_cp=args.hybrid_context_parallel,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=with_mtp,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    if hasattr(core_utils, "flatten_batch_for_packed_sequences"):
        batch = core_utils.flatten_batch_for_packed_sequences(batch)
    return batch


def packed_seq_params(batch: Batch) -> PackedSeqParams | None:
    """Document boundaries in the form that attention takes, or ``None`` without packing."""
    if batch["cu_seqlens"] is None:
        return None
    boundaries, padded = batch["cu_seqlens"][0], batch["cu_seqlens_padded"]
    padded = None if padded is None else padded[0]
    # The throughput log counts the real tokens, attention runs over the padded ones.
    training_loop.update_seqlen_stats_from_cu_seqlens(boundaries)
    used = boundaries if padded is None else padded
    longest = int(batch["max_seqlen"].item())
    local_cp_size = batch["local_cp_size"]
    return call_known(
        PackedSeqParams,
        qkv_format="thd",
        cu_seqlens_q=used,
        cu_seqlens_kv=used,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        local_cp_size=None if local_cp_size is None else int(local_cp_size.item()),
        cp_group=batch["hybrid_cp_group"],
        tokens_per_sample=get_args().seq_length,
    )


def dataset_config(args: Namespace) -> GPTDatasetConfig:
    """Megatron's description of the data set, from its command-line arguments."""
    blend, blend_per_split = training_utils.get_blend_and_blend_per_split(args)
    sequences_per_dataset = None
    if args.per_dataset_sequences_path is not None:
        with open(args.per_dataset_sequences_path, encoding="utf-8") as file:
            sequences_per_dataset = json.load(file)
    values = {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "tokenizer": build_tokenizer(args),
        "blend": blend,
        "blend_per_split": blend_per_split,
        "path_to_cache": args.data_cache_path,
        "create_attention_mask": args.create_attention_mask_in_dataloader,
        "fast_cache_load": args.dataloader_fast_cache_load,
        "defer_npy_index_mmap": args.dataloader_defer_npy_index_mmap,
        "inter_document_masking": getattr(args, "dataloader_inter_document_masking", False),
        "sequences_per_dataset": sequences_per_dataset,
        "sequence_parallel_size": args.tensor_model_parallel_size * args.sequence_parallel,
    }
    kind: Any = GPTDatasetConfig
    if args.fim_data:
        kind = GPTFIMDatasetConfig
        names = ("prefix", "middle", "suffix", "pad", "eod")
        values["fim_extra_tokens"] = {name: getattr(args, f"fim_{name}_token") for name in names}
    fields = {field.name for field in dataclasses.fields(kind) if field.init}
    # The other fields, those of --eod-mask-loss and --reset-position-ids among them, have the
    # names of their arguments.
    same_name = {
        name: getattr(args, name) for name in fields - values.keys() if hasattr(args, name)
    }
    return kind(**same_name, **{k: v for k, v in values.items() if k in fields})


def builds_dataset(vp_stage: int | None = None) -> bool:
    """Say whether this rank reads data: one rank of each tensor-parallel group that needs it."""
    args = get_args()
    return mpu.get_tensor_model_parallel_rank() == 0 and (
        packs_sequences(args)
        or masks_documents(args)
        or training_utils.is_first_or_last_pipeline_stage(vp_stage)
        or has_mtp(core_transformer_config_from_args(args), vp_stage)
    )


class FewDocuments(MockGPTLowLevelDataset):  # type: ignore[misc]
    """Megatron's mock documents, 1,000 instead of 100,000.

    Megatron shuffles all their sequences, which takes longer than a small job's training.
    """

    size = 1000


class MockDataset(MockGPTDataset):  # type: ignore[misc]
    """Megatron's mock data set, of few documents."""

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: Any) -> Any:
        """Return the documents."""
        return FewDocuments(config.tokenizer)


def provide_datasets(samples: list[int], vp_stage: int | None = None) -> Any:
    """Build the training, validation and test sets for ``samples`` samples each."""
    args = get_args()
    kind: Any = MockDataset if args.mock_data else GPTDataset
    if args.sft:
        kind = SFTDataset
    elif args.fim_data and not args.mock_data:
        kind = GPTFIMDataset
    print_rank_0("> building train, validation and test data sets")
    builds = partial(builds_dataset, vp_stage=vp_stage)
    return BlendedMegatronDatasetBuilder(kind, samples, builds, dataset_config(args)).build()


# Megatron then calls the provider on every rank, which decides by builds_dataset.
provide_datasets.is_distributed = True  # type: ignore[attr-defined]


# --- one step -----------------------------------------------------------------------------------


def loss_func(
    loss_mask: torch.Tensor, output_tensor: torch.Tensor, model: Any = None
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the masked sum of the token losses, the number of tokens, and both to be logged.

    The sum, not the mean: Megatron divides by the tokens of a microbatch or, with
    ``--calculate-per-token-loss``, by those of the global batch.
    """
    mask = loss_mask.view(-1).float()
    loss = (output_tensor.view(-1).float() * mask).sum()
    num_tokens = mask.sum().detach().to(torch.int)
    if get_args().check_for_nan_in_loss_and_grad:
        rerun = get_rerun_state_machine()
        for name, rejects in (("NaN", torch.isnan), ("Inf", torch.isinf)):
            rerun.validate_result(
                result=loss,
                rejection_func=rejects,
                message=f"{name} in the loss of a microbatch",
                tolerance=0.0,
                fatal=True,
            )
    report = torch.cat([loss.detach().clone().view(1), num_tokens.view(1)])
    return loss, num_tokens, {"lm loss": report}


def forward_step(
    data_iterator: Iterator[Batch], model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Callable[..., Any]]:
    """Run one microbatch through ``model``; return its output and the loss still to be applied."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = get_batch(data_iterator, core_utils.get_attr_wrapped_model(model, "vp_stage"))
    packing = packed_seq_params(batch)
    timers("batch-generator").stop()
    inputs = (batch["tokens"], batch["position_ids"], batch["attention_mask"])
    targets = {"labels": batch["labels"], "loss_mask": batch["loss_mask"]}
    if return_schedule_plan:
        output = model.build_schedule_plan(*inputs, **targets)
    else:
        output = model(*inputs, **targets, packed_seq_params=packing)
    return output, partial(loss_func, batch["loss_mask"], model=model)


# --- model --------------------------------------------------------------------------------------


def dense_layer_spec(config: Any, use_te: bool) -> Any:
    """Megatron's specification of one dense layer, from TransformerEngine or local modules."""
    build = (
        gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec
        if use_te
        else gpt_layer_specs.get_gpt_layer_local_spec
    )
    # Every keyword of these two has the name of a field, except these two.
    names = inspect.signature(build).parameters
    values = {name: getattr(config, name) for name in names if hasattr(config, name)}
    values.pop("fp8", None)  # deprecated: the configuration itself carries it
    if "num_experts" in names:
        values["num_experts"] = config.num_moe_experts
    return build(**values)


def layer_spec(args: Namespace, config: Any, vp_stage: int | None) -> Any:
    """Megatron's specification of the decoder that the arguments ask for."""
    use_te = args.transformer_impl == "transformer_engine"
    if args.spec is not None:
        return import_module(args.spec)
    if args.experimental_attention_variant is not None:
        from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants

        return variants.get_transformer_block_with_experimental_attention_variant_spec(
            config=config, vp_stage=vp_stage
        )
    if args.num_experts:
        return gpt_layer_specs.get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=use_te,
            normalization=args.normalization,
            qk_l2_norm=args.qk_l2_norm,
            vp_stage=vp_stage,
        )
    if args.heterogeneous_layers_config_path is not None:
        return get_gpt_heterogeneous_layer_spec(config, use_te)
    return dense_layer_spec(config, use_te)


def prediction_spec(args: Namespace, config: Any, decoder: Any, vp_stage: int | None) -> Any:
    """Multi-token prediction repeats the decoder's last layer; ``None`` without it."""
    if args.mtp_num_layers is None:
        return None
    use_te = args.transformer_impl == "transformer_engine"
    if getattr(decoder, "layer_specs", None) == []:
        # An uneven pipeline can leave the last stage without a decoder layer to repeat.
        last = dense_layer_spec(config, use_te)
    else:
        last = gpt_layer_specs.get_gpt_decoder_layer_specs(
            config,
            use_transformer_engine=use_te,
            normalization=args.normalization,
            qk_l2_norm=args.qk_l2_norm,
            vp_stage=vp_stage,
        )[-1]
    return gpt_layer_specs.get_gpt_mtp_block_spec(
        config, last, use_transformer_engine=use_te, vp_stage=vp_stage
    )


def model_arguments(config: Any) -> dict[str, Any]:
    """What a GPT model and a hybrid one are built with, for releases before 0.19."""
    args = get_args()
    return {
        "config": config or core_transformer_config_from_args(args),
        "vocab_size": args.padded_vocab_size,
        "max_sequence_length": args.max_position_embeddings,
        "fp16_lm_cross_entropy": args.fp16_lm_cross_entropy,
        "parallel_output": True,
        "share_embeddings_and_output_weights": not args.untie_embeddings_and_output_weights,
        "position_embedding_type": args.position_embedding_type,
        "rotary_percent": args.rotary_percent,
        "rotary_base": args.rotary_base,
    }


def provide_model(config: Any = None, vp_stage: int | None = None, **stage: Any) -> GPTModel:
    """Build one pipeline stage of the model, for releases before 0.19 (0.19 builds its own)."""
    args, common = get_args(), model_arguments(config)
    decoder = layer_spec(args, common["config"], vp_stage)
    return GPTModel(
        transformer_layer_spec=decoder,
        rope_scaling=args.use_rope_scaling,
        mtp_block_spec=prediction_spec(args, common["config"], decoder, vp_stage),
        vp_stage=vp_stage,
        **stage,
        **common,
    )


def embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """Pipeline ranks that hold the word embedding: first, last when tied, and those of MTP."""
    ranks = {pp_ranks[0]}
    if len(pp_ranks) > 1:
        args = get_args()
        if not args.untie_embeddings_and_output_weights:
            ranks.add(pp_ranks[-1])
        ranks.update(mtp.get_mtp_ranks(pp_ranks, core_transformer_config_from_args(args)))
    return sorted(ranks)


def main(
    provide_model: Callable[..., Any] = provide_model, configure: str = "gpt_config_from_args"
) -> None:
    """Start Megatron's training loop in the way of the installed release.

    Args:
        provide_model: builds one pipeline stage, for releases before 0.19.
        configure: name of Megatron's function that describes the model, for 0.19.
    """
    # 0.19 divides by the evaluation interval even when nothing is to be evaluated.
    defaults = {"tokenizer_type": "GPT2BPETokenizer", "eval_interval": 1000}
    common = {"get_embedding_ranks": embedding_ranks}
    model_type = ModelType.encoder_or_decoder
    args = parse_and_validate_args(args_defaults=defaults)
    if hasattr(argument_utils, "gpt_config_from_args"):  # 0.19
        model_config = getattr(argument_utils, configure)(args)
        container = argument_utils.pretrain_cfg_container_from_args(args, model_config)
        pretrain(container, provide_datasets, model_type, forward_step, **common)
        return
    container = argument_utils.pretrain_cfg_container_from_args(args)  # 0.18
    pretrain(container, provide_datasets, provide_model, model_type, forward_step, **common)


if __name__ == "__main__":
    main()
