# SPDX-License-Identifier: Apache-2.0
"""From replayed gradients to the losses' shares, by way of files."""

from pathlib import Path

import pytest
import torch

from megatron_ttrace.run.separation import FACTOR, Separation
from megatron_ttrace.trace.captured import Share
from megatron_ttrace.trace.findings import Loss
from megatron_ttrace.trace.records import STEP_LEVEL, Kind, TraceKey
from megatron_ttrace.trace.store import Entry, TraceReader, TraceWriter, seal

WEIGHT = TraceKey(1, STEP_LEVEL, Kind.MAIN_GRAD, "decoder.layers.0.mlp.router.weight", 0)
FIRST = TraceKey(1, 0, Kind.GRAD_OUTPUT, "decoder.layers.0.pre_mlp_layernorm", 0)
SECOND = TraceKey(1, 0, Kind.GRAD_INPUT, "decoder.layers.0.mlp.router", 0)
OTHER = TraceKey(1, STEP_LEVEL, Kind.MAIN_GRAD, "embedding.word_embeddings.weight", 0)
MAIN = {key: torch.full((4, 2), float(n + 1)) for n, key in enumerate((WEIGHT, SECOND, OTHER))}
ADDED = {
    Loss.Z: {WEIGHT: torch.full((4, 2), 0.25), SECOND: torch.zeros(4, 2)},
    Loss.MTP: {WEIGHT: torch.zeros(4, 2), SECOND: torch.full((4, 2), 0.5)},
}


@pytest.fixture
def reference(tmp_path: Path) -> TraceReader:
    """A trace in which a gradient has two names."""
    writer = TraceWriter(tmp_path / "reference", 0)
    for key, value in MAIN.items():
        first = FIRST if key == SECOND else key
        line = writer.add(Entry.of(first, value), value)
        if first != key:
            writer.add(Entry.of(key, value, same_as=line), None)
    writer.close()
    seal(tmp_path / "reference", {})
    return TraceReader(tmp_path / "reference")


def replay(loss: Loss | None, isolated: bool, writer: TraceWriter) -> None:
    """Isolated, only the second name of a gradient is as the module computed it."""
    for key, main in MAIN.items():
        value = main.clone()
        for added_loss, added in ADDED.items():
            share = added.get(key, torch.zeros(4, 2))
            value += share * (FACTOR if added_loss is loss else 1.0)
        if key != SECOND:
            writer.add(Entry.of(key, value), value)
        elif isolated:
            writer.add(Entry.of(FIRST, main), main)
            writer.add(Entry.of(SECOND, value), value)
        else:
            line = writer.add(Entry.of(FIRST, value), value)
            writer.add(Entry.of(SECOND, value, same_as=line), None)


@pytest.mark.parametrize("isolated", [False, True])
def test_there_and_back(reference: TraceReader, tmp_path: Path, isolated: bool) -> None:
    """Of the wanted gradients, every loss's share, and of each module's own."""
    separation = Separation(
        reference=str(reference.directory),
        checksum=reference.checksum,
        keys=(WEIGHT, SECOND),
        losses=(Loss.Z, Loss.MTP),
        isolated=isolated,
    )
    separation.write(reference, replay, tmp_path / "shares")
    shares_by_key = separation.read(tmp_path / "shares")
    assert set(shares_by_key) == {WEIGHT, SECOND}
    for key, shares in shares_by_key.items():
        by_loss = {(share.loss, share.own): share for share in shares}
        assert set(by_loss) == {
            (loss, own) for loss in ADDED for own in ((True,) if isolated else (False, True))
        }
        for (loss, _), share in by_loss.items():
            assert isinstance(share, Share)
            torch.testing.assert_close(share.value, ADDED[loss][key])
