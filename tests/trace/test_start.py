# SPDX-License-Identifier: Apache-2.0
"""Start values read from a reference have the bits of generated ones."""

import pytest
import torch

from megatron_ttrace.mcore.parameters import place_parameter
from megatron_ttrace.placement.mesh import SINGLE
from megatron_ttrace.run.start import moments
from megatron_ttrace.run.start.parameters import fill
from megatron_ttrace.trace import start
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.records import STEP_LEVEL, Kind, TraceKey
from megatron_ttrace.trace.start import StartValues, write_moments
from megatron_ttrace.trace.store import TraceReader, seal
from tests.mcore.test_parameters import FC1, Config, parameter, sharded
from tests.placement.meshes import mesh_of
from tests.run.start.test_moments import primed
from tests.trace import traces


def state_of(main, place, mesh, **how):
    """A primed optimizer's state of one parameter."""
    return primed(main, place=place, mesh=mesh, **how).state[main]


def kept(directory, dtype=torch.float32):
    """A reference of one parameter, with its start values."""
    main = parameter(8, 6, dtype=dtype)
    place = place_parameter(FC1, main, SINGLE, stacked=2)
    fill(place, main, SINGLE, seed=7, config=Config(), init="reveal")
    made = {}
    state_of(main, place, SINGLE, keep=made.__setitem__)
    traces.written(directory, {TraceKey(2, STEP_LEVEL, Kind.PARAM, FC1): main.data})
    write_moments(directory, made)
    seal(directory, {})
    return directory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stored_values_are_the_generated_ones(tmp_path, monkeypatch, dtype):
    """A gated half under TP and a range of it under ZeRO, from files of one moment each."""
    monkeypatch.setattr(start, "_FILE_BYTES", 1)
    stored = StartValues(TraceReader(kept(tmp_path, dtype)), 2)
    generated, used = moments.generate, []
    monkeypatch.setattr(moments, "generate", lambda *a: used.append(a) or generated(*a))
    for rank in range(2):
        mesh = mesh_of(rank, 2, tp=2)
        one, other = sharded(4, 6, dtype=dtype), sharded(4, 6, dtype=dtype)
        place = place_parameter(FC1, one, mesh, stacked=2)
        how = {"config": Config(), "init": "reveal"}
        fill(place, one, mesh, seed=7, **how)
        fill(place, other, mesh, seed=8, **how, stored=stored)  # a seed that is not used
        assert torch.equal(one, other)
        for flat, shape in ((None, (4, 6)), ((5, 18), (13,))):
            mine = state_of(parameter(*shape), place, mesh, flat=flat)
            used.clear()
            read = state_of(parameter(*shape), place, mesh, flat=flat, stored=stored)
            assert not used
            for name in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(mine[name], read[name])


def test_values_of_another_form_are_not_used(tmp_path):
    """Another dtype, shape, name or iteration: the candidate generates them itself."""
    reader = TraceReader(kept(tmp_path))
    stored = StartValues(reader, 2)
    assert stored.parameter(FC1, (8, 6), torch.float32) is not None
    assert stored.parameter(FC1, (8, 6), torch.bfloat16) is None
    assert stored.parameter(FC1, (6, 8), torch.float32) is None
    assert stored.parameter("another", (8, 6), torch.float32) is None
    assert StartValues(reader, 3).parameter(FC1, (8, 6), torch.float32) is None
    assert stored.moment(f"{FC1}/exp_avg", (8, 6)) is not None
    assert stored.moment(f"{FC1}/exp_avg", (8, 7)) is None
    assert stored.moment(f"{FC1}/another", (8, 6)) is None


def test_a_damaged_file_is_refused(tmp_path):
    """By its checksum, and, on ranks that do not read all files, by what cannot be parsed."""
    checksum = TraceReader(kept(tmp_path)).checksum
    path = tmp_path / "start.0000.safetensors"
    path.write_bytes(b"\xff" * path.stat().st_size)
    with pytest.raises(TTraceError, match="damaged"):
        TraceReader(tmp_path)
    reader = TraceReader(tmp_path, announced=checksum)
    with pytest.raises(TTraceError, match="damaged"):
        StartValues(reader, 2)
