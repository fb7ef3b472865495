# SPDX-License-Identifier: Apache-2.0
"""Training loops on megatron-core, and what a check needs of each: its *front*.

The rest of this package reads options by the names of Megatron-LM's arguments, and wraps no
function of a loop itself.
"""

from __future__ import annotations

import dataclasses
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch

from megatron_ttrace.mcore.arguments import MegatronArguments, Optimizer, Scheduler
from megatron_ttrace.trace.errors import TTraceError

UNWATCHED = MappingProxyType(
    {
        # Neither the line of numbers, which needs timers that run, nor figures of the machine.
        "log_interval": sys.maxsize,
        "tensorboard_log_interval": 1,
        "log_l2_norm_grad_to_tensorboard": False,
        "log_loss_scale_to_tensorboard": False,
        "log_memory_interval": None,
        "log_memory_to_tensorboard": False,
        "log_runtime_to_tensorboard": False,
        "log_throughput_to_tensorboard": False,
        "log_timers_to_tensorboard": False,
        "log_world_size_to_tensorboard": False,
        "skip_train_metrics_log": False,
    }
)
"""Options of ``training_log`` while it is called, as far as a loop has them. The loss scale is the
check's own."""


class Watch(Protocol):
    """What a front calls at the points of its loop, on all ranks."""

    def building(self) -> None:
        """Process groups exist, the model does not: a reference fits on the GPU."""

    def built(
        self, chunks: list[torch.nn.Module], optimizer: Optimizer, scheduler: Scheduler
    ) -> None:
        """Model and optimizer exist; a checkpoint, if there is one, is loaded."""

    def step(self, run: Callable[[], Any], iterator: Any) -> Any:
        """Instead of the training step ``run``, whose microbatches come from ``iterator``.

        Returns what the step returns.
        """


@dataclasses.dataclass(frozen=True, slots=True)
class StepNumbers:
    """What is logged with a step, as far as it is computed; ``zeros`` are those in gradients."""

    skipped: Any = 0
    params_norm: Any = None
    zeros: Any = None
    max_logit: Any = 0.0


class Front(ABC):
    """A training loop.

    Attributes:
        marks: files that mark a directory to start from, beside Megatron-LM's.
        has_flags: whether its options are flags of the command line.
        unloaded: why a checkpoint is not also loaded on one device, for comparison; empty if it is.
        only_in_plans: arguments that the loop gives to ``build_schedule_plan`` of a model, and not
            to its ``forward``.
        logs: whether :meth:`log` reports anything.
    """

    marks: tuple[str, ...] = ()
    has_flags = False
    unloaded = ""
    only_in_plans: tuple[str, ...] = ()
    logs = True

    @abstractmethod
    def arguments(self) -> MegatronArguments:
        """The validated options, by the names of Megatron-LM's arguments."""

    def is_wrapped(self) -> bool:
        """Whether the loop calls a watch."""
        return False

    def wrap(self, watch: Watch) -> None:  # noqa: B027 - a step may be handed over instead
        """Let the loop call ``watch``."""

    def microbatches(self) -> int:
        """Of this rank in a step: as Megatron's calculator counts them."""
        from megatron.core.num_microbatches_calculator import get_num_microbatches

        return int(get_num_microbatches())

    def hand_over(self, directory: Path) -> None:  # noqa: B027 - most need nothing
        """Write what a reference needs beside options, before there is one. A collective.

        ``directory`` is the ``--ttrace-dir``, which is ours by now.
        """

    def bounds(self) -> tuple[str, ...]:
        """The batch's tensor [samples, sequences + 1] of where packed sequences start and end.

        Context parallelism divides each of them. Rows are filled up with their last number. Of
        several names the first that a batch has; empty if sequences are not packed so.
        """
        return ()

    def deal_to(self, ranks: int) -> None:  # noqa: B027 - a loop may not read samples itself
        """Let samples be dealt as to this many data-parallel ranks, before there are loaders."""

    @abstractmethod
    def synchronise(self, chunks: list[torch.nn.Module], optimizer: Optimizer) -> None:
        """Gather updated parameters of ``--overlap-param-gather`` now."""

    def parameters_norm(self) -> Callable[..., Any]:
        """The function that computes the norm of all parameters, for the log.

        Raises:
            TTraceError: for a loop that logs none.
        """
        raise TTraceError("this loop logs no norm of parameters")

    def log(  # noqa: B027 - not all loops have one
        self, writer: Any, chunks: list[torch.nn.Module], optimizer: Any, step: StepNumbers
    ) -> None:
        """Report a step with the loop's own function. A collective.

        ``writer`` has TensorBoard's interface, and gets the numbers.
        """

    def complete(self, args: MegatronArguments) -> list[str]:
        """Give options that the loop crashes without; notices about them."""
        del args
        return []

    def notices(self) -> list[str]:
        """How this run is checked, as far as that is the loop's; for the report."""
        return []

    def writers(self) -> tuple[Any, Any]:
        """The job's own TensorBoard and W&B writers, or ``None``, on this rank."""
        return None, None
