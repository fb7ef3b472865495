# SPDX-License-Identifier: Apache-2.0
"""A training loop of somebody's own on megatron-core, of which one step is handed over.

Its options are the fields of the configurations that model, data-parallel wrapper and optimizer
have, and what the microbatches show.
"""

from __future__ import annotations

import hashlib
import math
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_ttrace.mcore.arguments import MegatronArguments, Optimizer
from megatron_ttrace.mcore.fronts.bridge_options import Options
from megatron_ttrace.mcore.fronts.front import Front
from megatron_ttrace.mcore.groups import device_of
from megatron_ttrace.trace import shared
from megatron_ttrace.trace.checksum import checksum
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.records import Kind, TraceKey
from megatron_ttrace.trace.store import Entry, TraceWriter, seal
from megatron_ttrace.trace.views import every_tensor

_NEITHER = types.MappingProxyType(
    {
        **dict.fromkeys(("load", "train_iters", "eval_interval", "save_interval", "exit_interval")),
        **dict.fromkeys(("rampup_batch_size", "pretrained_checkpoint")),
        **dict.fromkeys(("log_params_norm", "log_num_zeros_in_grad"), False),
        "consumed_train_samples": 0,
        "iteration": 0,
        "make_vocab_size_divisible_by": 1,
        "num_floating_point_operations_so_far": 0.0,
        "seed": 1234,
    }
)
"""Options that such a loop does not have."""
_VALUES, _OFFSETS = ".values", ".offsets"
"""Of a nested tensor, in names of tensors."""
_BOUNDS = "cu_seqlens"
"""Name of the tensor [sequences + 1] of where packed sequences start and end, with padding."""


class OwnLoop(Front):
    """The front of such a loop; ``known`` has options that follow from nothing else."""

    logs = False

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        optimizer: Any,
        batches: Sequence[Mapping[str, Any]],
        known: Mapping[str, Any],
    ) -> None:
        from megatron.core import parallel_state
        from megatron.core.utils import get_model_config

        rows, length = _shape(batches)
        ranks = parallel_state.get_data_parallel_world_size()
        config = get_model_config(chunks[0])
        facts = {
            "data_parallel_size": ranks,
            "global_batch_size": rows * len(batches) * ranks,
            "micro_batch_size": rows,
            "seq_length": length,
            "padded_vocab_size": None,
            "untie_embeddings_and_output_weights": not any(
                getattr(module, "share_embeddings_and_output_weights", False)
                for chunk in chunks
                for module in chunk.modules()
            ),
        }
        ddp = getattr(chunks[0], "ddp_config", None)
        parts = types.SimpleNamespace(model=config, optimizer=optimizer.config, ddp=ddp)
        self._known = {**_NEITHER, **facts, **known}
        self._arguments = Options(parts, self._known)
        self._batches = batches
        self._device = device_of(chunks)

    def arguments(self) -> MegatronArguments:
        """What the configurations say."""
        return self._arguments

    def microbatches(self) -> int:
        """As many as were handed over."""
        return len(self._batches)

    def hand_over(self, directory: Path) -> None:
        """Write the microbatches; a digest of all ranks' becomes a part of the identity."""
        from megatron.core import parallel_state as mpu

        home = directory / shared.BATCHES
        writer = TraceWriter(home, mpu.get_data_parallel_rank())
        marks = hashlib.sha256()
        for number, batch in enumerate(self._batches):
            for name, value in {**batch, **numbers_of(batch)}.items():
                if torch.is_tensor(value):
                    marks.update(f"{name}/{checksum(value)};".encode())
                    key = TraceKey(1, number, Kind.TOKENS, name)
                    writer.add(Entry.of(key, value), value)
        is_copy = (
            mpu.get_tensor_model_parallel_rank()
            or mpu.get_pipeline_model_parallel_rank()
            or mpu.get_context_parallel_rank()
        )
        if not is_copy:
            writer.close()
        # Not an object collective, which would read pickles.
        digest = torch.tensor([*marks.digest()], dtype=torch.uint8, device=self._device)
        count = torch.tensor([len(self._batches)], device=self._device)
        digests, counts = (
            [torch.empty_like(each) for _ in range(dist.get_world_size())]
            for each in (digest, count)
        )
        dist.all_gather(digests, digest)
        dist.all_gather(counts, count)
        if len(numbers := {int(number) for number in counts}) > 1:
            raise TTraceError(
                f"megatron_ttrace.step: ranks have {' and '.join(map(str, sorted(numbers)))} "
                "microbatches: give all of them the same number"
            )
        content = torch.cat(digests).cpu().numpy().tobytes()
        if dist.get_rank() == 0:
            seal(home, {"role": shared.BATCHES})
        self._known["batches"] = hashlib.sha256(content).hexdigest()[:16]

    def bounds(self) -> tuple[str, ...]:
        """``cu_seqlens``, or else the offsets of samples of different lengths."""
        names = tuple(name for name in self._batches[0] if name.endswith(_OFFSETS))
        return (_BOUNDS, *names) if names or _BOUNDS in self._batches[0] else ()

    def synchronise(self, chunks: list[torch.nn.Module], optimizer: Optimizer) -> None:
        """As ``force_param_sync`` of megatron/training/training.py."""
        # From 0.19 on: weights in MXFP8 are gathered through the gradients' buffer.
        if prepare := getattr(optimizer, "prepare_model_params_for_param_sync", None):
            prepare()
        for chunk in chunks:
            chunk.start_param_sync(force_sync=True)  # type: ignore[operator]

    def notices(self) -> list[str]:
        """What is not compared."""
        return ["the reference has the candidate's microbatches: how they were read is not checked"]


def flat(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A microbatch with two plain tensors for each nested one: its values and their offsets.

    Raises:
        TTraceError: for a nested tensor of another form than [samples, lengths, ...], and for
            tensors in containers.
    """
    plain: dict[str, Any] = {}
    for name, value in batch.items():
        if not torch.is_tensor(value) and every_tensor(value):
            raise TTraceError(
                f"megatron_ttrace.step: {name} is a {type(value).__name__} of tensors: give each "
                "tensor of a microbatch a name of its own"
            )
        if not (torch.is_tensor(value) and value.is_nested):
            plain[name] = value
        elif value.layout is torch.jagged and value.is_contiguous() and _is_ragged(value):
            jagged: Any = value  # whose methods a type checker does not know
            plain[name + _VALUES], plain[name + _OFFSETS] = jagged.values(), jagged.offsets()
        else:
            raise TTraceError(
                f"megatron_ttrace.step: {name} is a nested tensor, but not a contiguous one "
                "[samples, lengths, ...] of layout torch.jagged"
            )
    return plain


def numbers_of(batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The numbers in a microbatch, such as of tokens that its loss counts, or in its lists."""
    found = {}
    for name, value in batch.items():
        items = value if isinstance(value, list | tuple) else [value]
        if items and all(map(_is_number, items)):
            has_fractions = any(isinstance(number, float) for number in items)
            found[name] = torch.tensor(value, dtype=torch.float64 if has_fractions else None)
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 63)


def nested(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The microbatch that :func:`flat` made plain."""
    original: dict[str, Any] = {}
    for name, value in batch.items():
        if (stem := name.removesuffix(_VALUES)) + _OFFSETS in batch and stem != name:
            offsets = batch[stem + _OFFSETS]
            original[stem] = torch.nested.nested_tensor_from_jagged(value, offsets)
        elif (stem := name.removesuffix(_OFFSETS)) + _VALUES not in batch or stem == name:
            original[name] = value
    return original


def _is_ragged(value: torch.Tensor) -> bool:
    """Whether the dim after the samples is the one of different lengths."""
    return not isinstance(value.shape[1], int)


def _shape(batches: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """Rows and length of a microbatch: of its first largest tensor with two dims of integers.

    Samples of different lengths are a row: a model packs them.
    """
    shapes: list[tuple[int, int]] = []
    for name, value in batches[0].items() if batches else ():
        is_number = torch.is_tensor(value) and value.dtype != torch.bool  # that is a mask
        if not is_number or value.is_floating_point():
            continue
        if name.endswith(_VALUES):
            shapes.append((1, int(value.shape[0])))
        elif value.dim() == 2:
            shapes.append((int(value.shape[0]), int(value.shape[1])))
    if shapes:
        return max(shapes, key=math.prod)
    raise TTraceError(
        "megatron_ttrace.step: give batches=[...], a dictionary for each microbatch, with tokens "
        "[samples, sequence]"
    )
