# SPDX-License-Identifier: Apache-2.0
"""A check reaches Megatron's own TensorBoard writer, where TensorBoard is installed."""

from pathlib import Path

import pytest

from tests.integration.jobs import TP, check


def test_scalars_beside_the_training_curves(tmp_path: Path) -> None:
    """The event file holds the worst margin, also when the check ends the job."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    check(tmp_path, *TP, "--tensorboard-dir", tmp_path / "events")
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    (worst,) = events.Scalars("ttrace/worst_margin")
    assert worst.step == 1
    assert 0 < worst.value < 1
    assert "ttrace/margin/decoder.layers.0" in events.Tags()["scalars"]
