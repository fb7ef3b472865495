# SPDX-License-Identifier: Apache-2.0
"""The start values that a reference keeps, so that a candidate need not generate them again.

Parameters are in the trace as such (``param`` before the step). The optimizer's moments are in
files beside it, ``start.0000.safetensors`` and so on, which ``meta.json`` lists like all others.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from megatron_ttrace.trace import owned
from megatron_ttrace.trace.records import STEP_LEVEL, Kind, TraceKey
from megatron_ttrace.trace.store import TraceReader

_FILE = re.compile(r"start\.\d{4,9}\.safetensors")
_FILE_BYTES = 256 << 20


def write_moments(directory: Path, moments: Mapping[str, torch.Tensor]) -> None:
    """Write moments by name, before the trace is sealed; no file has much more than 256 MB."""
    for number, part in enumerate(_parts(moments)):
        with owned.written_by_others(directory / f"start.{number:04d}.safetensors") as path:
            save_file(part, path)


def _parts(moments: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    part: dict[str, torch.Tensor] = {}
    for name, moment in moments.items():
        part[name] = moment
        if sum(moment.nbytes for moment in part.values()) >= _FILE_BYTES:
            yield part
            part = {}
    if part:
        yield part


class StartValues:
    """The start values of a traced step in a reference; whole tensors, memory-mapped."""

    def __init__(self, reference: TraceReader, iteration: int) -> None:
        """Open them. Raises ``TTraceError`` when a file is damaged."""
        self._reference = reference
        self._iteration = iteration
        files = filter(_FILE.fullmatch, reference.files)
        self._files = {name: file for file in files for name in reference.names(file)}

    def parameter(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor | None:
        """A parameter as it was before the step, if the reference has it in this form."""
        key = TraceKey(self._iteration, STEP_LEVEL, Kind.PARAM, name)
        if key not in self._reference:
            return None
        entry = self._reference.entry(key)
        fits = entry.shape == shape and f"torch.{entry.dtype}" == str(dtype)
        return self._reference.tensor(entry) if fits else None

    def moment(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        """A moment in float32 by its name, if the reference has it in this form."""
        file = self._files.get(name)
        moment = None if file is None else self._reference.stored(file, name)
        fits = moment is not None and moment.shape == shape and moment.dtype == torch.float32
        return moment if fits else None
