# SPDX-License-Identifier: Apache-2.0
"""What Megatron reports of a training step beside losses and gradient norm.

A loop calls ``training_log`` (megatron/training/training.py) after each step. That sums up
auxiliary losses over microbatches, layers and ranks, and gives all numbers to TensorBoard's writer.
So it is called after a traced step, too, with a writer that keeps them.
"""

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_ttrace.mcore import fronts, sources
from megatron_ttrace.mcore.fronts.front import StepNumbers

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


class _Writer:
    """Keeps what would be written to TensorBoard; curves over samples repeat those over steps."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def add_scalar(self, tag: str, scalar_value: Any, *_: Any, **__: Any) -> None:
        """As TensorBoard's."""
        if not tag.endswith(" vs samples"):
            is_tensor = torch.is_tensor(scalar_value)
            self.values[tag] = scalar_value.clone() if is_tensor else scalar_value
            caller = sys._getframe(1)
            PLACES[tag] = sources.shown(caller.f_code, caller.f_lineno)

    def __getattr__(self, name: str) -> Callable[..., None]:
        """TensorBoard's other methods, which a fork may call: they write no numbers."""
        if not name.startswith("add_") and name not in ("flush", "close"):
            raise AttributeError(name)
        return lambda *_, **__: None


def reported(
    result: Sequence[Any],
    chunks: list[torch.nn.Module],
    optimizer: Any,
    params_norm: Callable[..., Any],
) -> dict[str, Any]:
    """What Megatron would log of a step, on the rank that logs; nothing on the others.

    A collective. Losses and gradient norm are left out: the step returns them in ``result``.
    ``params_norm`` calls the function that computes the norm of all parameters.
    """
    front = fronts.current()
    args = front.arguments()
    norm = params_norm(front.parameters_norm(), chunks) if args.log_params_norm else None
    # Without the option, optimizers return 0 or None, depending on their class.
    zeros = result[_ZEROS] if args.log_num_zeros_in_grad else None
    step = StepNumbers(result[_SKIPPED], norm, zeros, result[_LOGITS])
    return _logged(chunks, optimizer, step)


def left_over(chunks: list[torch.nn.Module], optimizer: Any) -> dict[str, float]:
    """What Megatron would log of a step that adds nothing, just after it has logged a step.

    Sums over a step are emptied when they are logged; what is left in them would be added to the
    next step's. A collective; nothing on ranks that do not log. Shares of right choices are left
    out, for some are of all steps so far, and numbers that are not defined without a step.
    """
    numbers = _logged(chunks, optimizer, StepNumbers())
    sums = {
        name: float(value)
        for name, value in numbers.items()
        if name not in _GIVEN and not name.endswith(CHOICES)
    }
    return {name: value for name, value in sums.items() if math.isfinite(value)}


def _logged(chunks: list[torch.nn.Module], optimizer: Any, step: StepNumbers) -> dict[str, Any]:
    """What the loop's log gives to its writer."""
    writer = _Writer()
    fronts.current().log(writer, chunks, optimizer, step)
    return writer.values if dist.get_rank() == dist.get_world_size() - 1 else {}


def is_rounded(metric: str) -> bool:
    """Whether a number is rounded to the dtype of the model.

    That is the z loss (``z_loss_func`` in megatron/core/transformer/moe/moe_utils.py), which has
    the dtype of the router's logits. Auxiliary losses are computed from scores in float32
    (``compute_routing_scores_for_aux_loss``).
    """
    args = fronts.current().arguments()
    return _Z_LOSS in metric and not getattr(args, "moe_router_dtype", None)
