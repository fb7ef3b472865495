# SPDX-License-Identifier: Apache-2.0
"""Gathers of updated parameters that overlap the next forward pass (``--overlap-param-gather``).

A bucket is gathered when the forward pass needs it, unless it was gathered before
(``_ParamAndGradBucketGroup.finish_param_sync`` in
megatron/core/distributed/param_and_grad_buffer.py). A check has to read parameters right after the
update, so it gathers them itself. To see what a job does, its forward passes must do so again.
"""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron_ttrace.mcore.groups import device_of
from megatron_ttrace.mcore.replaced import replaced
from megatron_ttrace.mcore.statistics import bucket_groups

_CHAOS, _SIZE = 1e4, 0.1
"""A factor after which a sine says little about its argument, which fp16 still holds; and a usual
size of parameters."""


@contextlib.contextmanager
def still_due(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Gathers that the next forward pass would make remain due, whatever is gathered within."""
    due = _due(chunks)
    try:
        yield
    finally:
        for group in due:
            group.param_gather_dispatched = False


@contextlib.contextmanager
def nothing_else(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Within, Megatron gathers only what is due or on its way.

    A bucket that Megatron takes for gathered keeps the job's own values: after an update they are
    those with which the next forward pass computes. Call it on all ranks.
    """
    with contextlib.ExitStack() as stack:
        for group in _groups(chunks):
            gathered = group.param_gather_dispatched and group.param_gather_handle is None
            # A gather is a collective: either all ranks make it or none.
            agreed = torch.tensor(int(gathered), device=device_of(chunks))
            ranks = group.intra_distributed_optimizer_instance_group
            torch.distributed.all_reduce(agreed, torch.distributed.ReduceOp.MIN, group=ranks)
            if agreed.item():
                nothing = [(group, "start_param_sync", lambda *_, **__: None)]
                stack.enter_context(replaced(nothing))
        yield


@contextlib.contextmanager
def without_effect(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """What is gathered within, while it is still due, is as it was before again afterwards.

    So a checkpoint has what the job itself would have saved.
    """
    parameters = [p for group in _due(chunks) for bucket in group.buckets for p in bucket.params]
    before = [parameter.data.clone() for parameter in parameters]
    try:
        yield
    finally:
        for parameter, value in zip(parameters, before, strict=True):
            parameter.data.copy_(value)


def spoil(chunks: Sequence[torch.nn.Module]) -> list[torch.nn.Parameter]:
    """Overwrite what the next forward pass has to gather: without the gather it computes otherwise.

    A rank's own part of a bucket stays. Call it where all ranks have the same parameters. What is
    written follows from what was there, in place, by nothing that a repair undoes. Returns the
    parameters.
    """
    due = _due(chunks)
    with torch.no_grad():
        for group in due:
            own = group.intra_distributed_optimizer_instance_rank
            for bucket in group.buckets:
                if group.ddp_config.use_distributed_optimizer:
                    size = group.intra_distributed_optimizer_instance_size
                    parts = [[part] for part in torch.chunk(bucket.param_data, size)]
                else:
                    # Layer-wise optimizers divide a bucket by parameters.
                    owned = bucket.layerwise_params_list
                    parts = [[parameter.data for parameter in each] for each in owned]
                for tensor in itertools.chain(*parts[:own], *parts[own + 1 :]):
                    if tensor.is_floating_point():
                        tensor.mul_(_CHAOS).sin_().mul_(_SIZE)
    return [parameter for group in due for bucket in group.buckets for parameter in bucket.params]


def _due(chunks: Sequence[torch.nn.Module]) -> list[Any]:
    """Groups of buckets that the next forward pass gathers."""
    return [group for group in _groups(chunks) if not group.param_gather_dispatched]


def _groups(chunks: Sequence[torch.nn.Module]) -> list[Any]:
    """Groups of buckets that forward passes gather."""
    gathering = [chunk for chunk in chunks if getattr(chunk, "use_forward_hook", False)]
    return [group for chunk in gathering for group in bucket_groups(chunk)]


@contextlib.contextmanager
def in_forward_passes(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Forward passes gather parameters, also in the first step of a run.

    Megatron does not let them before that step has ended (``train`` in
    megatron/training/training.py), because it would hide start values that differ between ranks.
    """
    from megatron.core.utils import get_model_config

    silent: list[Any] = [
        chunk
        for chunk in chunks
        if getattr(chunk, "use_forward_hook", False) and not chunk.remove_forward_pre_hook_handles
    ]
    with contextlib.ExitStack() as stack:
        for chunk in silent:
            chunk.enable_forward_pre_hook()
            stack.callback(chunk.disable_forward_pre_hook, param_sync=False)
        if silent and silent[0].ddp_config.align_param_gather:
            config = get_model_config(chunks[0])
            stack.callback(setattr, config, "param_sync_func", config.param_sync_func)
            starts = [chunk.start_param_sync for chunk in silent]
            config.param_sync_func = starts if len(starts) > 1 else starts[0]
        yield
