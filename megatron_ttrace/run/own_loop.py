# SPDX-License-Identifier: Apache-2.0
"""``megatron_ttrace.step``: a training step of a loop of somebody's own, checked.

Under ``ttrace check`` the candidate's ranks write their microbatches and start a reference: the
same script on one device, where :func:`is_reference` is true. There the step gets all of these
microbatches, in the order of the global batch. The step must be a function, because it runs several
times: perturbed, and once more with modules isolated.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ttrace.jobs import argv, provenance
from megatron_ttrace.jobs.settings import CHECK, split
from megatron_ttrace.trace import shared
from megatron_ttrace.trace.errors import TTraceError

if TYPE_CHECKING:  # a program that reads a report has these names, too
    import torch

type Microbatch = Mapping[str, Any]

_RESULTS = 8
"""Of Megatron's ``train_step``: losses, skipped, ..., norm of gradients, zeros in them, logit."""


def is_reference() -> bool:
    """Whether this process makes the reference: the script must build its model for one device."""
    return _is_checked() and split(argv.ours())[0].role == "reference"


def step[T](
    run: Callable[[Sequence[Microbatch]], T],
    model: torch.nn.Module | Sequence[torch.nn.Module],
    optimizer: Any,
    batches: Sequence[Microbatch],
    *,
    scheduler: Any = None,
    **options: Any,
) -> T:
    """Run a training step; under ``ttrace check``, check it, and end the job with the answer.

    Args:
        run: forward and backward passes of the microbatches it is given, and the optimizer's step.
            Returns the losses by name as they are logged (of all data-parallel ranks), or what
            Megatron's ``train_step`` returns, or nothing.
        model: its chunks on this rank, wrapped by Megatron's ``DistributedDataParallel``.
        optimizer: a ``MegatronOptimizer``.
        batches: this rank's microbatches: tensors by name. Ranks that differ only in tensor,
            pipeline or context parallelism have the same. Nested tensors [samples, lengths, ...]
            count as one packed row.
        scheduler: Megatron's ``OptimizerParamScheduler``, if ``run`` steps one.
        options: of Megatron-LM that follow from none of these, e.g. ``seed=7``.

    Returns:
        What ``run`` returns, without a check.
    """
    if not _is_checked():
        return run(batches)
    import torch

    from megatron_ttrace.mcore import fronts
    from megatron_ttrace.mcore.fronts import own
    from megatron_ttrace.run import entry
    from megatron_ttrace.run.loop import Watch

    with entry.exits_on_user_error(unexpected=True):
        settings = split(argv.ours())[0]
        entry.require_unshrunk(settings)
        if not (settings.exit_after or settings.role == "reference") or settings.iterations != (1,):
            raise TTraceError(
                "megatron_ttrace.step checks the first step, and ends the job: add --ttrace-exit, "
                "and omit --ttrace-iterations"
            )
        chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
        _require(optimizer)
        batches = [own.flat(batch) for batch in batches]
        if settings.role == "reference":
            batches = _read(provenance.placed(settings.directory) / shared.BATCHES, batches)
        fronts.use(own.OwnLoop(chunks, optimizer, batches, options))
        watch = Watch(settings)
        watch.building()
        watch.built(chunks, optimizer, scheduler or _Unscheduled())
        # What microbatches are taken from (capture/batches.py).
        source = types.SimpleNamespace(iterable=iter([dict(batch) for batch in batches]))
        watch.step(functools.partial(_stepped, run, source, len(batches)), source)
        raise TTraceError("the step was not checked")


def _stepped(run: Callable[..., Any], source: types.SimpleNamespace, count: int) -> Any:
    from megatron_ttrace.mcore.fronts import own

    result = run([own.nested(next(source.iterable)) for _ in range(count)])
    if isinstance(result, tuple) and len(result) == _RESULTS:
        return result
    losses = result if isinstance(result, dict) else {}
    return losses, 0, False, False, 0, None, None, None


def _require(optimizer: Any) -> None:
    """Refuse an optimizer that is not Megatron's.

    Raises:
        TTraceError: saying what to give instead.
    """
    if not hasattr(optimizer, "config"):
        raise TTraceError(
            f"megatron_ttrace.step: {type(optimizer).__name__} is not an optimizer of Megatron's: "
            "make it with megatron.core.optimizer.get_megatron_optimizer"
        )


class _Unscheduled:
    """Instead of a scheduler."""

    def __init__(self) -> None:
        self.num_steps = 0

    def step(self, increment: int) -> None:
        """Nothing changes with the samples."""

    def state_dict(self) -> dict[str, float | str]:
        """Nothing."""
        return {}


def _is_checked() -> bool:
    return CHECK.name in argv.words()


def _read(home: Path, batches: Sequence[Microbatch]) -> list[Microbatch]:
    """All microbatches of the candidate, in the order of the global batch.

    Values that are neither tensors nor numbers are those of this process's first microbatch.
    """
    import torch

    from megatron_ttrace.trace.store import TraceReader

    constants = {name: value for name, value in batches[0].items() if not torch.is_tensor(value)}
    device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    reader = TraceReader(home)
    ranks = [reader.ranks[rank] for rank in sorted(reader.ranks)]
    microbatches: dict[int, dict[str, Any]] = {}
    for rank, entries in enumerate(ranks):
        for entry in entries:
            number = entry.key.microbatch * len(ranks) + rank
            batch = microbatches.setdefault(number, dict(constants))
            value, name = reader.tensor(entry), entry.key.name
            constant = constants.get(name)
            if isinstance(constant, int | float | list | tuple):
                numbers = value.tolist()
                batch[name] = tuple(numbers) if isinstance(constant, tuple) else numbers
            else:
                batch[name] = value.clone().to(device)
    return [microbatches[number] for number in sorted(microbatches)]
