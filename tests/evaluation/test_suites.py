# SPDX-License-Identifier: Apache-2.0
"""Data sets of the suites, and how finished checks are summed up."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron_ttrace.evaluation import suites
from megatron_ttrace.evaluation.suites import Data
from tests.report.synthetic_report import make_verdict

WORDS = 128


def tokens(data: Data, folder: Path) -> NDArray[np.uint16]:
    """All tokens of a data set."""
    prefix = Path(suites.data_arguments(data, folder, WORDS)[1])
    return np.fromfile(prefix.with_suffix(".bin"), dtype=np.uint16)


def test_documents(tmp_path: Path) -> None:
    """From a token to several sequences of the matrix; the last id ends them; written once."""
    ids = tokens(Data.DOCUMENTS, tmp_path)
    prefix = Path(suites.data_arguments(Data.DOCUMENTS, tmp_path, WORDS)[1])
    written = prefix.with_suffix(".bin").stat().st_mtime_ns
    suites.data_arguments(Data.DOCUMENTS, tmp_path, WORDS)
    assert prefix.with_suffix(".bin").stat().st_mtime_ns == written
    lengths = np.diff(np.flatnonzero(ids == WORDS - 1))
    assert lengths.min() <= 2
    assert lengths.max() > 3 * 32
    assert ids.max() == WORDS - 1


def test_uneven(tmp_path: Path) -> None:
    """Stretches of 96 tokens have a share of ends from almost none to nearly all.

    Another vocabulary has data of its own: its last word ends documents.
    """
    other = Path(suites.data_arguments(Data.UNEVEN, tmp_path, 60)[1])
    assert np.fromfile(other.with_suffix(".bin"), dtype=np.uint16).max() == 59
    ids = tokens(Data.UNEVEN, tmp_path)
    shares = (ids.reshape(-1, 96) == WORDS - 1).mean(axis=1)
    assert shares.min() < 0.02
    assert shares.max() > 0.85


def test_margin() -> None:
    """That of a tensor that was judged."""
    assert suites.margin_of(make_verdict(rel_err=3e-4, tolerance=1e-3)) == pytest.approx(0.3)
