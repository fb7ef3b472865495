# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's own loop, megatron/training/training.py.

``pretrain`` calls the module globals ``setup_model_and_optimizer`` and (through ``train``)
``train_step``, in all supported releases.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from megatron_ttrace.mcore import samples
from megatron_ttrace.mcore.arguments import MegatronArguments, Optimizer
from megatron_ttrace.mcore.fronts.front import UNWATCHED, Front, StepNumbers, Watch
from megatron_ttrace.mcore.replaced import replaced, wrap
from megatron_ttrace.mcore.versions import call_known

_EVAL_INTERVAL = 1000
_WRITERS = ("get_tensorboard_writer", "get_wandb_writer")


class MegatronLM(Front):
    """Megatron-LM's front."""

    has_flags = True

    def arguments(self) -> MegatronArguments:
        """``megatron.training.get_args()``."""
        from megatron.training import get_args

        return get_args()  # type: ignore[no-any-return]

    def is_wrapped(self) -> bool:
        """Whether :meth:`wrap` was called in this process."""
        return getattr(_training().train_step, "is_watched", False)

    def wrap(self, watch: Watch) -> None:
        """Wrap two functions."""
        training = _training()

        def around_setup(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            watch.building()
            built = original(*args, **kwargs)
            watch.built(*built)
            return built

        def around_step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            iterator = kwargs["data_iterator"] if "data_iterator" in kwargs else args[1]
            return watch.step(functools.partial(original, *args, **kwargs), iterator)

        wrap(training, "setup_model_and_optimizer", around_setup)
        wrap(training, "train_step", around_step)
        training.train_step.is_watched = True

    def bounds(self) -> tuple[str, ...]:
        """Those of ``SFTDataset`` (megatron/training/datasets/sft_dataset.py)."""
        return ("cu_seqlens",) if getattr(self.arguments(), "sft", False) else ()

    def deal_to(self, ranks: int) -> None:
        """Let shuffled samples be dealt as to this many data-parallel ranks."""
        from megatron.training.datasets.data_samplers import MegatronPretrainingRandomSampler

        samples.deal_to(ranks, MegatronPretrainingRandomSampler)

    def synchronise(self, chunks: list[torch.nn.Module], optimizer: Optimizer) -> None:
        """``force_param_sync``."""
        call_known(_training().force_param_sync, chunks, optimizer=optimizer)

    def parameters_norm(self) -> Callable[..., Any]:
        """``calc_params_l2_norm``."""
        return _training().calc_params_l2_norm  # type: ignore[no-any-return]

    def log(
        self, writer: Any, chunks: list[torch.nn.Module], optimizer: Any, step: StepNumbers
    ) -> None:
        """``training_log``."""
        from megatron.core.utils import get_attr_wrapped_model

        training, args = _training(), self.arguments()
        log = _log_of(training)
        writers = dict.fromkeys(_WRITERS, lambda: None) | {_WRITERS[0]: lambda: writer}
        values: list[tuple[Any, str, Any]] = [(args, *option) for option in UNWATCHED.items()]
        values += [(training, *function) for function in writers.items()]
        with replaced(values):
            log(
                loss_dict={},
                total_loss_dict={},
                learning_rate=training.get_canonical_lr_for_logging(optimizer.param_groups),
                iteration=1,
                loss_scale=1.0,
                report_memory_flag=False,
                skipped_iter=step.skipped,
                grad_norm=None,
                params_norm=step.params_norm,
                num_zeros_in_grad=step.zeros,
                max_attention_logit=step.max_logit,
                pg_collection=get_attr_wrapped_model(chunks[0], "pg_collection"),
                is_first_iteration=False,
            )

    def complete(self, args: MegatronArguments) -> list[str]:
        """``--eval-interval``: it is a divisor, also if nothing is evaluated (finding 32).

        Only the number of samples to evaluate depends on it, and nothing in a traced step.
        """
        unset = getattr(args, "eval_interval", _EVAL_INTERVAL) is None
        if not unset or getattr(args, "full_validation", False):
            return []
        args.eval_interval = _EVAL_INTERVAL
        return [
            f"checked with --eval-interval {_EVAL_INTERVAL}: without it Megatron's training "
            "crashes (finding 32)"
        ]

    def writers(self) -> tuple[Any, Any]:
        """Those of ``megatron.training.global_vars``."""
        from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

        return get_tensorboard_writer(), get_wandb_writer()


def _training() -> Any:
    import megatron.training.training as training

    return training


def _log_of(training: Any) -> Callable[..., Any]:
    """Megatron's own ``training_log``: a script's wrapper of it must not see a rehearsal."""
    current: Callable[..., Any] = training.training_log
    if getattr(current, "__globals__", None) is vars(training):
        return current
    constants = training.__spec__.loader.get_code(training.__name__).co_consts
    code = next(c for c in constants if getattr(c, "co_name", "") == "training_log")
    # Arguments without a value are None, as with Megatron's own defaults.
    return FunctionType(code, vars(training), None, (None,) * code.co_argcount)
