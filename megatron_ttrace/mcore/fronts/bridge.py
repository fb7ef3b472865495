# SPDX-License-Identifier: Apache-2.0
"""Megatron-Bridge's loop, ``pretrain`` of megatron/bridge/training/pretrain.py.

Its first call finishes the configuration (``runtime_config_update``). ``setup`` builds the model
(``_build_distributed_model``), optimizer and data; ``train`` calls ``train_step`` of its module.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from megatron_ttrace.mcore import samples
from megatron_ttrace.mcore.arguments import MegatronArguments, Optimizer
from megatron_ttrace.mcore.fronts.bridge_batches import (
    BATCH,
    PACKED,
    Microbatches,
    Rejoined,
    padding,
)
from megatron_ttrace.mcore.fronts.bridge_options import Options
from megatron_ttrace.mcore.fronts.front import UNWATCHED, Front, StepNumbers, Watch
from megatron_ttrace.mcore.replaced import replaced, wrap
from megatron_ttrace.trace.errors import TTraceError

_PACKAGE = "megatron.bridge.training"
_PADDED = "pad_to_max_length"
_TRACKERS = {
    "wandb_project": "_wandb_logger",
    "mlflow_experiment": "_mlflow_logger",
    "comet_project": "_comet_logger",
}
"""Fields of ``logger``, and what the ``GlobalState`` makes of them when it is asked."""


def _module(name: str) -> Any:
    return importlib.import_module(f"{_PACKAGE}.{name}")


class Bridge(Front):
    """The front of a ``pretrain`` with this ``ConfigContainer``."""

    # megatron/bridge/training/utils/checkpoint_utils.py: its file of the latest iteration, the
    # folder of an iteration, a model of Hugging Face.
    marks = ("latest_train_state.pt", "run_config.yaml", "config.json")
    unloaded = "Megatron-Bridge loads its checkpoints itself"
    # megatron/bridge/training/gpt_step.py, ``_forward_step_common``.
    only_in_plans = ("loss_mask",)

    def __init__(self, cfg: Any) -> None:
        self._cfg = cfg
        self._options = Options(cfg)
        self._state: Any = None
        self._dealt_to = 1
        self._pretrained = cfg.checkpoint.pretrained_checkpoint
        self._recompute_method = getattr(self._options, "recompute_method", None)
        self._padding = padding(cfg.dataset, self._options)
        self._pads = False
        self._divided: Microbatches | None = None

    def arguments(self) -> MegatronArguments:
        """The configuration; what is set in it is set for the run."""
        return self._options

    def is_wrapped(self) -> bool:
        """Whether :meth:`wrap` was called in this process."""
        return getattr(_module("train").train_step, "is_watched", False)

    def wrap(self, watch: Watch) -> None:
        """Wrap three functions."""
        pretrain, setup, train = map(_module, ("pretrain", "setup", "train"))

        def around_setup(original: Callable[..., Any], state: Any, *args: Any, **kw: Any) -> Any:
            self._state = state
            self._options.follow(state)
            output = original(state, *args, **kw)
            watch.built(output.model, output.optimizer, output.scheduler)
            return output

        def around_model(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            watch.building()
            return original(*args, **kwargs)

        def around_step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            iterator = kwargs["data_iterator"] if "data_iterator" in kwargs else args[1]
            if self._is_divided and iterator is not None:
                iterator = self._microbatches(iterator)
            return watch.step(functools.partial(original, *args, **kwargs), iterator)

        wrap(pretrain, "setup", around_setup)
        wrap(setup, "_build_distributed_model", around_model)
        wrap(train, "train_step", around_step)
        train.train_step.is_watched = True

    def _microbatches(self, iterator: Any) -> Microbatches:
        """Of a loader that gives all of a step; from now on ``iterator`` gives these, rejoined."""
        if self._divided is None:
            self._divided = Microbatches(iterator.iterable, self._dealt_to)
            iterator.iterable = Rejoined(self._divided)
        return self._divided

    def bounds(self) -> tuple[str, ...]:
        """What ``_cu_seqlens_for_cp_partition`` of gpt_step.py divides by."""
        data = self._cfg.dataset
        is_packed = any(getattr(data, name, False) for name in PACKED)
        return ("cu_seqlens_q_padded", "cu_seqlens_q", "cu_seqlens") if is_packed else ()

    def deal_to(self, ranks: int) -> None:
        """Let samples be dealt as to this many data-parallel ranks."""
        self._dealt_to = ranks
        sampler = importlib.import_module("megatron.bridge.data.samplers")
        samples.deal_to(ranks, sampler.MegatronPretrainingRandomSampler)

    def synchronise(self, chunks: list[torch.nn.Module], optimizer: Optimizer) -> None:
        """``force_param_sync``."""
        _module("train").force_param_sync(chunks, optimizer=optimizer)

    def parameters_norm(self) -> Callable[..., Any]:
        """``calc_params_l2_norm``."""
        from megatron.core.utils import get_model_config

        calculate = _module("utils.train_utils").calc_params_l2_norm

        @functools.wraps(calculate)  # whose module's kernels are followed
        def norm(chunks: list[torch.nn.Module]) -> Any:
            fsdp = self._cfg.dist.use_megatron_fsdp
            return calculate(chunks, get_model_config(chunks[0]), use_megatron_fsdp=fsdp)

        return norm

    def log(
        self, writer: Any, chunks: list[torch.nn.Module], optimizer: Any, step: StepNumbers
    ) -> None:
        """``training_log``."""
        utils, state, cfg = _module("utils.train_utils"), self._state, self._cfg
        values: list[tuple[Any, str, Any]] = [(cfg.logger, *field) for field in UNWATCHED.items()]
        for field, logger in _TRACKERS.items():
            values += [(cfg.logger, field, None), (state, logger, None)]
        values += [(state, "_tensorboard_logger", writer), (cfg, "profiling", None)]
        # At step 0 it would print a line.
        values += [(state.train_state, "step", 1)]
        groups = optimizer.param_groups
        rates = [group["lr"] for group in groups if not group["is_decoupled_lr"]]
        with replaced(values):
            utils.training_log(
                loss_dict={},
                total_loss_dict={},
                learning_rate=rates[-1] if rates else None,
                decoupled_learning_rate=None,
                loss_scale=1.0,
                report_memory_flag=False,
                skipped_iter=step.skipped,
                grad_norm=None,
                params_norm=step.params_norm,
                num_zeros_in_grad=step.zeros,
                config=cfg,
                global_state=state,
                history_wct=None,
                model=chunks,
                log_max_attention_logit=step.max_logit,
            )

    def writers(self) -> tuple[Any, Any]:
        """Those of the ``GlobalState``."""
        return self._state.tensorboard_logger, self._state.wandb_logger

    def update(self, original: Callable[[Any], None], *, reference: bool, exits: bool) -> None:
        """Finish the configuration of a run under check with ``runtime_config_update``.

        Raises:
            TTraceError: for a configuration that cannot be checked.
        """
        self._options.require()
        if reference:
            self._options.reset_others()
            if self._cfg.peft is not None:
                # It cannot be built without; the candidate's start comes after it.
                self._cfg.checkpoint.pretrained_checkpoint = self._pretrained
                # Without a granularity nothing is recomputed. It lets gradients reach the first
                # layer as in the candidate (megatron/bridge/peft/recompute.py).
                self._options.recompute_method = self._recompute_method
        self._pads = self._is_divided and exits and not self._is_padded()
        if self._pads:
            self._pad()
        original(self._cfg)
        if reference:
            for name, value in self._padding.items():
                setattr(self._cfg.dataset, name, value)
        if self._is_divided and self._cfg.data_parallel_size > 1 and not self._is_padded():
            raise TTraceError(
                "fine-tuning with data parallelism: each rank pads its samples to its longest one, "
                "so layouts differ by design: check with --ttrace-exit, which pads them to "
                "seq_length, or set dataset.dataset_kwargs['pad_to_max_length'] = True"
            )

    def notices(self) -> list[str]:
        """How this run is checked, for the report."""
        notices = []
        if self._pads:
            notices.append(
                "samples are padded to seq_length: each rank would pad them to its longest one"
            )
        if unknown := self._options.unknown():
            notices.append(
                f"{', '.join(unknown)}: not a field of a known Megatron-Bridge, so the reference "
                "has the same value"
            )
        return notices

    @property
    def _is_divided(self) -> bool:
        """Whether a loader gives all samples of a step at once."""
        return bool(self._cfg.dataset.dataloader_type == BATCH)

    def _is_padded(self) -> bool:
        data = self._cfg.dataset
        options = getattr(data, "dataset_kwargs", None) or {}
        packing = self._packing()
        return bool(options.get(_PADDED) or getattr(data, _PADDED, False)) and (
            packing is None or bool(packing.pad_cu_seqlens)
        )

    def _packing(self) -> Any:
        """How samples are packed; their borders are padded as well, to the most of a rank's."""
        data = self._cfg.dataset
        is_on = getattr(data, "enable_offline_packing", False)
        return data.offline_packing_specs if is_on else None

    def _pad(self) -> None:
        data = self._cfg.dataset
        if (packing := self._packing()) is not None:
            packing.pad_cu_seqlens = True
        if hasattr(data, _PADDED):
            setattr(data, _PADDED, True)
        elif hasattr(data, "dataset_kwargs"):
            data.dataset_kwargs = {**(data.dataset_kwargs or {}), _PADDED: True}
