# SPDX-License-Identifier: Apache-2.0
"""Megatron-Bridge's configuration, read and set by the names of Megatron-LM's options.

A ``ConfigContainer`` (megatron/bridge/training/config.py) has sub-configurations whose fields are,
mostly, named as the options. What a reference makes of a field follows from its option
(``mcore/options/decisions.py``); of fields that are no option, and of options with another name or
none, this file decides. ``tests/mcore/fronts/test_bridge_options.py`` compares it with Bridge.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_ttrace.mcore.options.decisions import SINGLE_DEVICE
from megatron_ttrace.mcore.options.roles import ROLES
from megatron_ttrace.trace.errors import TTraceError

SECTIONS = (
    *("model", "optimizer", "ddp", "scheduler", "train", "validation", "rng", "dist"),
    *("checkpoint", "dataset", "tokenizer", "logger", "profiling", "rerun_state_machine"),
)
"""Sub-configurations with options, in the order in which a name is looked up."""

DROPPED = (
    *("comm_overlap", "ft", "straggler", "nvrx_straggler", "tensor_inspect"),
    "inprocess_restart",
)
"""Sub-configurations about the layout, or about supervising a run: a reference has none of them."""

OTHERS = ("env_vars", "mixed_precision", "peft", "optimizer_config_override_provider")
"""Sub-configurations that define numbers: a reference keeps them as a whole."""

_OF_DDP = """
    average_in_collective bucket_size num_buckets pad_buckets_for_high_nccl_busbw
    param_name_patterns_for_fp32_local_accumulation reduce_scatter_with_fp32_accumulation
""".split()

RENAMED: Mapping[str, str] = MappingProxyType(
    {
        **{f"ddp_{field}": f"ddp.{field}" for field in _OF_DDP},
        "accumulate_allreduce_grads_in_fp32": "ddp.grad_reduce_in_fp32",
        "decoder_first_pipeline_num_layers": "model.num_layers_in_first_pipeline_stage",
        "decoder_last_pipeline_num_layers": "model.num_layers_in_last_pipeline_stage",
        "no_load_optim": "checkpoint.load_optim",
        "no_load_rng": "checkpoint.load_rng",
        "num_experts": "model.num_moe_experts",
        "profile": "profiling.use_nsys_profiler",
        "swiglu": "model.gated_linear_unit",
        "untie_embeddings_and_output_weights": "model.share_embeddings_and_output_weights",
    }
)
"""Option -> the field that is the same, or (``_NEGATED``) the opposite."""

_NEGATED = ("no_load_optim", "no_load_rng", "untie_embeddings_and_output_weights")

_RELEASED = ("megatron.bridge.", "megatron.core.", "megatron.training.")
"""Packages whose classes declare the fields of a release; others are a user's."""

_OF_SOME = frozenset(("persistent_workers", "dataloader_seq_length"))
"""What is read, and only some data sets, or scripts of Megatron-LM's, have."""

_RUNTIME = frozenset(
    """
    _cpu_offloading_context _pg_collection data_parallel_size finalize_model_grads_func
    grad_scale_func grad_sync_func moe_grad_scale_func mtp_grad_scale_func no_sync_func
    param_sync_func rank timers tokenizer _train_iters_from_num_epochs _feature_dirs_from_default
    """.split()
)
"""Fields that Bridge itself sets while it runs."""

_RESET: Mapping[str, Any] = MappingProxyType(
    {
        **dict.fromkeys(
            """
            also_save_hf_checkpoint cpu_offloading_double_buffering cpu_offloading_weights
            external_gpu_device_mapping log_l2_norm_grad_to_tensorboard
            log_runtime_to_tensorboard log_throughput_to_tensorboard
            megatron_fsdp_cuda_graph_mode megatron_fsdp_use_decoupled_grad tp_comm_atomic_ag
            tp_comm_atomic_rs tp_comm_overlap_disable_fc1 tp_comm_overlap_disable_qkv
            use_custom_fsdp cuda_graph_retain_backward_graph
            use_layer_wise_distributed_optimizer _checkpoint_load_required
            """.split(),
            False,
        ),
        **dict.fromkeys(
            """
            comet_experiment_name comet_project dataloader_save eval_context_parallel_size
            mlflow_experiment mlflow_run_name save_config_filepath cuda_graph_scope
            num_microbatches_with_partial_activation_checkpoints
            """.split(),
            None,
        ),
        "cpu_offloading_activations": True,
        "fsdp_all_gather_in_start_param_sync": True,
        "expert_gtp_weight_remat_size": 1,
        "gtp_weight_remat_size": 1,
        "vision_cuda_graph_impl": "none",
    }
)
"""Fields without an option that a single device does not need, or that write and log."""

_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "dist_train": "ranks that run other parts of the model are not known: omit it",
        "use_decentralized_pg": "process groups are not in megatron.core.parallel_state: set "
        "dist.use_decentralized_pg=False",
    }
)

_OF_EACH_EXPERT: Mapping[str, bool] = MappingProxyType(
    {"share_expert_adapters": False, "experts_shared_outer_loras": True}
)
"""Settings of adapters with which some see a part of the tokens only."""


def option_of(section: str, field: str) -> str:
    """The option that a field is; its own name if it is none."""
    place = f"{section}.{field}"
    return next((option for option, renamed in RENAMED.items() if renamed == place), field)


def has_rule(section: str, field: str) -> bool:
    """Whether it is known what a reference makes of a field; it keeps others."""
    is_own = any(field in fields for fields in (_REFUSED, _RESET, _RUNTIME, SINGLE_DEVICE))
    return is_own or option_of(section, field) in ROLES


class Options:
    """A ``ConfigContainer`` with the attributes of Megatron-LM's arguments, which set its fields.

    A name that is neither a field nor an option is an error, not a default. ``known`` has options
    that follow from nothing else, and may get more.
    """

    _cfg: Any
    _state: Any
    _known: Mapping[str, Any]

    def __init__(self, cfg: Any, known: Mapping[str, Any] = MappingProxyType({})) -> None:
        object.__setattr__(self, "_cfg", cfg)
        object.__setattr__(self, "_state", None)
        object.__setattr__(self, "_known", known)

    def follow(self, state: Any) -> None:
        """Read the position in the data from a ``GlobalState`` from now on."""
        object.__setattr__(self, "_state", state)

    def __getattr__(self, name: str) -> Any:
        """The value of an option.

        Raises:
            AttributeError: for an option that Bridge does not have.
            TTraceError: for a name that nothing is known about.
        """
        if name.startswith("__"):
            raise AttributeError(name)
        if name in self._known:
            return self._known[name]
        if name in _DERIVED:
            return _DERIVED[name](self._cfg, self._state)
        values = [not value if negated else value for _, _, value, negated in self._places(name)]
        if values:
            # A deprecated field may have moved to another section: it is None in the old one.
            return next((value for value in values if value is not None), None)
        if name in ROLES or name in SINGLE_DEVICE or name in _OF_SOME:
            raise AttributeError(name)
        raise TTraceError(f"{name}: what Megatron-Bridge calls this option is not known")

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an option in each sub-configuration that has it."""
        if name in _POSITION:
            setattr(self._state.train_state, _POSITION[name], value)
            return
        for owner, field, _, negated in self._places(name):
            setattr(owner, field, not value if negated else value)

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        """All fields, by the names of their options; others as ``section.field``."""
        values: dict[str, Any] = {}
        for section, owner in self._owners():
            for name, value in _fields(owner).items():
                if name in _RUNTIME or name in _RESET:
                    continue
                option = option_of(section, name)
                if option in ROLES:
                    values.setdefault(option, getattr(self, option))
                elif name in SINGLE_DEVICE:
                    values.setdefault(name, value)
                else:
                    values[f"{section}.{name}"] = value
        for section in OTHERS:
            value = getattr(self._cfg, section, None)
            for name, part in _fields(value).items():
                values[f"{section}.{name}"] = part
        if getattr(self._cfg, "peft", None) is not None:  # which references keep (fronts/bridge.py)
            values["peft.recompute_method"] = getattr(self, "recompute_method", None)
        values |= {"params_dtype": self.params_dtype, "padded_vocab_size": None}
        return {**values, **self._known}

    def reset_others(self) -> None:
        """Give fields that are no option the values of a reference."""
        for section in DROPPED:
            if hasattr(self._cfg, section):
                setattr(self._cfg, section, None)
        for name, value in _RESET.items():
            for owner in (self._cfg, *(owner for _, owner in self._owners())):
                if hasattr(owner, name):
                    setattr(owner, name, copy.copy(value))

    def require(self) -> None:
        """Refuse what cannot be checked.

        Raises:
            TTraceError: naming the field and the reason.
        """
        for section, owner in self._owners():
            for name, why in _REFUSED.items():
                value = getattr(owner, name, None)
                if getattr(value, "use_dist_train", value):
                    raise TTraceError(f"{section}.{name}: {why}")
        peft = getattr(self._cfg, "peft", None)
        if self.num_experts and any("linear_fc" in t for t in getattr(peft, "target_modules", ())):
            for name, value in _OF_EACH_EXPERT.items():
                if getattr(peft, name, not value) is value:
                    raise TTraceError(
                        f"peft.{name}={value}: adapters of single experts are not compared: check "
                        f"the job with {not value}, or without adapters of experts"
                    )

    def unknown(self) -> list[str]:
        """Fields that nothing is known about: a reference has their values."""
        return [
            f"{section}.{name}"
            for section, owner in self._owners()
            for name in _fields(owner)
            if not has_rule(section, name) and not _is_of_bridge(owner, name)
        ]

    def _places(self, option: str) -> Iterator[tuple[Any, str, Any, bool]]:
        """The fields that are an option: owner, name, value, and whether it is the negated one."""
        of, _, field = RENAMED.get(option, "").partition(".")
        for section, owner in self._owners():
            if not field and _has(owner, option):
                yield owner, option, getattr(owner, option), False
            elif section == of and hasattr(owner, field):
                yield owner, field, getattr(owner, field), option in _NEGATED

    def _owners(self) -> Iterator[tuple[str, Any]]:
        for section in SECTIONS:
            owner = getattr(self._cfg, section, None)
            inner = getattr(owner, "transformer", None) if section == "model" else None
            for part in (inner, owner):
                if part is not None:
                    yield section, part


def _fields(owner: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(owner):
        return {
            field.name: getattr(owner, field.name)
            for field in dataclasses.fields(owner)
            if hasattr(owner, field.name)
        }
    return dict(owner) if isinstance(owner, Mapping) else {}


def _is_of_bridge(owner: Any, name: str) -> bool:
    """Whether Bridge declares a field, which a class of the user's may declare again.

    Many of its classes inherit fields from ``megatron.training.config``.
    """
    return any(
        name in vars(kind).get("__annotations__", ())
        for kind in type(owner).__mro__
        if kind.__module__.startswith(_RELEASED)
    )


def _has(owner: Any, name: str) -> bool:
    """Whether it is a field; a provider has methods and attributes of other names, too."""
    return name in getattr(type(owner), "__dataclass_fields__", ()) and hasattr(owner, name)


def _data_words(cfg: Any, _: Any) -> list[str]:
    """Prefixes and files of the data, as ``--data-path`` has them."""
    from torch.utils._pytree import tree_leaves

    data = cfg.dataset
    blends = [getattr(data, name, None) for name in ("blend", "blend_per_split")]
    words = [word for word in tree_leaves(blends) if isinstance(word, str)]
    root = getattr(data, "dataset_root", None)
    # Beside them Bridge writes indices.
    return [*words, *map(str, sorted(Path(root).glob("*.jsonl")) if root else ())]


def _padded_vocabulary(cfg: Any, _: Any) -> int | None:
    """As ``calculate_padded_vocab_size`` (megatron/bridge/training/utils/tokenizer_utils.py)."""
    model = cfg.model
    if model.vocab_size is None:
        return None
    if not getattr(model, "should_pad_vocab", False):
        return int(model.vocab_size)
    options = Options(cfg)
    multiple = options.make_vocab_size_divisible_by * options.tensor_model_parallel_size
    return int(math.ceil(model.vocab_size / multiple) * multiple)


_POSITION = {
    "iteration": "step",
    "consumed_train_samples": "consumed_train_samples",
    "consumed_valid_samples": "consumed_valid_samples",
    "skipped_train_samples": "skipped_train_samples",
    "num_floating_point_operations_so_far": "floating_point_operations_so_far",
}


def _position(field: str) -> Callable[[Any, Any], Any]:
    return lambda cfg, state: 0 if state is None else getattr(state.train_state, field)


_DERIVED: dict[str, Callable[[Any, Any], Any]] = {
    "data_path": _data_words,
    "data_parallel_size": lambda cfg, state: cfg.data_parallel_size,
    "defer_embedding_wgrad_compute": lambda cfg, state: any(
        # ``runtime_config_update`` copies it to the model.
        getattr(part, "defer_embedding_wgrad_compute", False)
        for part in (cfg.model, getattr(cfg, "comm_overlap", None))
    ),
    "group_query_attention": lambda cfg, state: Options(cfg).num_query_groups is not None,
    "padded_vocab_size": _padded_vocabulary,
    **{name: _position(field) for name, field in _POSITION.items()},
}
"""Options that follow from other fields, or from the run's state."""
