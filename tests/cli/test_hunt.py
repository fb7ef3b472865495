# SPDX-License-Identifier: Apache-2.0
"""``ttrace hunt``: its arguments, and what it prints."""

import pytest

from megatron_ttrace.cli.main import main


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--", "absent.py", "--num-layers", "2"], "absent.py: no such script"),
        (["--minutes", "soon"], "--minutes"),
        (["--", "python"], "no training script"),
        (
            "-- torchrun --nproc-per-node 3 x.py --tensor-model-parallel-size 2".split(),
            "cannot be divided",
        ),
    ],
)
def test_bad_input(capsys, tmp_path, monkeypatch, words, reason):
    """One line that says what to do."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").touch()
    assert main(["hunt", *words]) == 2
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1
    assert reason in error[0]
