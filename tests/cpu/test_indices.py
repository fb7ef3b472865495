# SPDX-License-Identifier: Apache-2.0
"""Our indices of data sets are bit for bit those of Megatron's compiled helper."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.cpu import indices
from megatron_ttrace.trace.errors import TTraceError

compiled = pytest.importorskip("megatron.core.datasets.helpers_cpp")


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=8),
    epochs=st.integers(1, 3),
    length=st.integers(2, 20),
    drop=st.booleans(),
    extra=st.integers(0, 1),
    seed=st.integers(0, 99),
)
def test_samples(lengths, epochs, length, drop, extra, seed):
    """Empty documents, several epochs, a partial last sample, with and without the extra token."""
    tokens = sum(lengths)
    if tokens < 2 or epochs * tokens - extra < length:
        return
    sizes = np.array(lengths, dtype=np.int32)
    random = np.random.default_rng(seed)
    order = [random.permutation(len(lengths)) for _ in range(epochs)]
    given_ = (sizes, np.concatenate(order).astype(np.int32), length, epochs, tokens, drop, extra)
    for name in ("build_sample_idx_int32", "build_sample_idx_int64"):
        wanted, found = getattr(compiled, name)(*given_), getattr(indices, name)(*given_)
        assert wanted.dtype == found.dtype
        np.testing.assert_array_equal(wanted, found)


@given(weights=st.lists(st.floats(0.01, 10), min_size=1, max_size=6), size=st.integers(0, 200))
def test_blending(weights, size):
    """By weight."""
    shares = np.array(weights) / sum(weights)
    both = []
    for build in (compiled.build_blending_indices, indices.build_blending_indices):
        arrays = np.zeros(size, dtype=np.int16), np.zeros(size, dtype=np.int64)
        build(*arrays, shares, len(weights), size, False)
        both.append(arrays)
    np.testing.assert_array_equal(both[0], both[1])


@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=6))
def test_exhaustive_blending(sizes):
    """By number of samples."""
    both = []
    for module in (compiled, indices):
        arrays = np.zeros(sum(sizes), dtype=np.int16), np.zeros(sum(sizes), dtype=np.int64)
        wanted = np.array(sizes, dtype=np.int64)
        module.build_exhaustive_blending_indices(*arrays, wanted, len(sizes))
        both.append(arrays)
    np.testing.assert_array_equal(both[0], both[1])


def test_what_is_not_there():
    """Masked data sets are refused in one line, and no function of the extension is missing."""
    with pytest.raises(TTraceError, match="pybind11"):
        indices.build_mapping()
    names = {name for name in dir(compiled) if name.startswith("build_")}
    assert names == set(indices.__all__)
