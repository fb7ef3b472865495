# SPDX-License-Identifier: Apache-2.0
"""What Megatron reports of a training step beside losses and gradient norm.

``train`` calls ``training_log`` (megatron/training/training.py) after each step. That sums up
auxiliary losses over microbatches, layers and ranks, and gives all numbers to TensorBoard's writer.
So it is called after a traced step, too, with a writer that keeps them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any

import torch
import torch.distributed as dist

from megatron_ttrace.mcore import sources
from megatron_ttrace.mcore.quiet import changed

_UNWATCHED = MappingProxyType(
    {
        # Neither the line of numbers, which needs timers that run, nor figures of the machine.
        "log_interval": sys.maxsize,
        "tensorboard_log_interval": 1,
        "log_loss_scale_to_tensorboard": False,
        "log_memory_to_tensorboard": False,
        "log_memory_interval": None,
        "log_timers_to_tensorboard": False,
        "log_world_size_to_tensorboard": False,
    }
)
"""Options of ``training_log`` while it is called. The loss scale is the check's own."""

_SKIPPED, _ZEROS, _LOGITS = 1, 6, 7
"""Positions in what ``train_step`` returns."""

COUNTS = frozenset(("num-zeros",))
"""Numbers that count elements."""

CHOICES = "_acceptance_rate"
"""End of the names of numbers that count right choices: of the likeliest token (MTP)."""

PLACES: dict[str, str] = {}
"""By name, the code of Megatron that reported each number in this process."""

_GIVEN = ("learning-rate", "batch-size", "max_attention_logit", "skipped-train-samples")
"""Numbers that ``training_log`` does not sum up."""

_Z_LOSS = "z_loss"

_WRITERS = ("get_tensorboard_writer", "get_wandb_writer")


class _Writer:
    """Keeps what would be written to TensorBoard; curves over samples repeat those over steps."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def add_scalar(self, name: str, value: Any, step: Any) -> None:
        """As TensorBoard's."""
        del step
        if not name.endswith(" vs samples"):
            self.values[name] = value.clone() if torch.is_tensor(value) else value
            caller = sys._getframe(1)
            PLACES[name] = sources.shown(caller.f_code, caller.f_lineno)


def reported(
    result: Sequence[Any],
    chunks: list[torch.nn.Module],
    optimizer: Any,
    params_norm: Callable[..., Any],
) -> dict[str, Any]:
    """What Megatron would log of a step, on the rank that logs; nothing on the others.

    A collective. Losses and gradient norm are left out: the step returns them.

    Args:
        result: what ``train_step`` returned.
        chunks: this rank's model chunks.
        optimizer: Megatron's.
        params_norm: calls the function that computes the norm of all parameters.
    """
    import megatron.training.training as training
    from megatron.training import get_args

    args = get_args()
    norm = params_norm(training.calc_params_l2_norm, chunks) if args.log_params_norm else None
    # An optimizer that is not asked for zeros returns 0 or None, as its class has it.
    zeros = result[_ZEROS] if args.log_num_zeros_in_grad else None
    return _logged(chunks, optimizer, result[_SKIPPED], norm, zeros, result[_LOGITS])


def left_over(chunks: list[torch.nn.Module], optimizer: Any) -> dict[str, float]:
    """What Megatron would log of a step that adds nothing, just after it has logged a step.

    Sums over a step are emptied when they are logged; what is left in them would be added to the
    next step's. A collective; nothing on ranks that do not log. Shares of right choices are left
    out, for some are of all steps so far, and numbers that are not defined without a step.
    """
    found = _logged(chunks, optimizer, 0, None, None, 0.0)
    sums = {
        name: float(value)
        for name, value in found.items()
        if name not in _GIVEN and not name.endswith(CHOICES)
    }
    return {name: value for name, value in sums.items() if math.isfinite(value)}


def _logged(
    chunks: list[torch.nn.Module],
    optimizer: Any,
    skipped: Any,
    params_norm: Any,
    zeros: Any,
    max_logit: Any,
) -> dict[str, Any]:
    """What ``training_log`` gives to its writer."""
    import megatron.training.training as training
    from megatron.core.utils import get_attr_wrapped_model
    from megatron.training import get_args

    args = get_args()
    log = _of(training)
    if log is None:
        return {}
    writer = _Writer()
    writers = dict.fromkeys(_WRITERS, lambda: None) | {_WRITERS[0]: lambda: writer}
    values: list[tuple[Any, str, Any]] = [(args, *one) for one in _UNWATCHED.items()]
    values += [(training, *one) for one in writers.items()]
    with changed(values):
        log(
            loss_dict={},
            total_loss_dict={},
            learning_rate=training.get_canonical_lr_for_logging(optimizer.param_groups),
            iteration=1,
            loss_scale=1.0,
            report_memory_flag=False,
            skipped_iter=skipped,
            grad_norm=None,
            params_norm=params_norm,
            num_zeros_in_grad=zeros,
            max_attention_logit=max_logit,
            pg_collection=get_attr_wrapped_model(chunks[0], "pg_collection"),
            is_first_iteration=False,
        )
    return writer.values if dist.get_rank() == dist.get_world_size() - 1 else {}


def is_found() -> bool:
    """Whether this Megatron has a ``training_log`` that can be called."""
    import megatron.training.training as training

    return _of(training) is not None


def is_rounded(metric: str) -> bool:
    """Whether a number is rounded to the dtype of the model.

    That is the z loss (``z_loss_func`` in megatron/core/transformer/moe/moe_utils.py), which has
    the dtype of the router's logits. Auxiliary losses are computed from scores in float32
    (``compute_routing_scores_for_aux_loss``).
    """
    from megatron.training import get_args

    return _Z_LOSS in metric and not getattr(get_args(), "moe_router_dtype", None)


def _of(training: ModuleType) -> Callable[..., Any] | None:
    """Megatron's own ``training_log``: a script's wrapper of it must not see a rehearsal."""
    current = getattr(training, "training_log", None)
    if current is None:
        return None
    if getattr(current, "__globals__", None) is vars(training):
        return current  # type: ignore[no-any-return]
    code = training.__spec__.loader.get_code(training.__name__)  # type: ignore[union-attr]
    own = (one for one in code.co_consts if getattr(one, "co_name", "") == "training_log")
    found = next(own, None)
    # Arguments that are not given are None, as Megatron's own defaults are.
    return found and FunctionType(found, vars(training), None, (None,) * found.co_argcount)
