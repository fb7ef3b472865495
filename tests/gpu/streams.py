# SPDX-License-Identifier: Apache-2.0
"""Capture of modules that run on streams of their own, each held back before it writes."""

import tempfile
from pathlib import Path
from typing import Any

import torch

from megatron_ttrace.compare.measure import relative_error
from megatron_ttrace.compare.planning import RankLayout
from megatron_ttrace.compare.sinks import CompareSink
from megatron_ttrace.placement.mesh import SINGLE
from megatron_ttrace.trace.store import TraceReader, TraceWriter, seal
from tests.capture.recorder import Model, batch, tapped
from tests.compare.traces import writing

_DELAY = 20_000_000
"""Cycles, about 10 ms: a tensor that is read too early is read before it is written."""


class OnStreams(Model):
    """Each layer runs on a stream of its own; so does its backward pass, by autograd."""

    def forward(self, ids: torch.Tensor, *, labels: torch.Tensor) -> torch.Tensor:
        if not ids.is_cuda:
            return super().forward(ids, labels=labels)
        here = torch.cuda.current_stream()
        x = self.embedding(ids)
        for layer in self.layers:
            aside = torch.cuda.Stream()
            aside.wait_stream(here)
            with torch.cuda.stream(aside):
                torch.cuda._sleep(_DELAY)
                x = layer(x)
            here.wait_stream(aside)
        logits = self.output_layer(x)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def run(sink: Any, where: str) -> None:
    """One microbatch, forward and backward."""
    model = OnStreams(layers=4).to(where)
    ids, labels = (one.to(where) for one in batch())
    with tapped([model], sink):
        model(ids, labels=labels).backward()


def side_streams(where: str) -> dict[str, Any]:
    """Everything captured, and everything stored, has the CPU's values."""
    with tempfile.TemporaryDirectory() as home:
        with writing(Path(home, "reference")) as reference_sink:
            run(reference_sink, "cpu")
        reference = TraceReader(Path(home, "reference"))
        writer = TraceWriter(Path(home, "candidate"), 0)
        layout = RankLayout(SINGLE, 5, 1.0)
        sink = CompareSink(reference, 1, layout, writer=writer, keep_all=True)
        run(sink, where)
        worst = 0.0
        for one in sink.measured:
            assert one.sums is not None, one
            error = relative_error(one.sums, 0.0)
            assert error < 1e-4, f"{one.key}: relative error {error}"
            worst = max(worst, error)
        writer.close()
        seal(writer.directory, {"role": "candidate"})
        candidate = TraceReader(writer.directory)
        for key in reference:
            ours, theirs = (trace.tensor(trace.entry(key)) for trace in (candidate, reference))
            assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-5), f"{key} was stored wrongly"
    return {"tensors": len(sink.measured), "largest_relative_error": worst}
