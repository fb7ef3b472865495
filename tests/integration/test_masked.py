# SPDX-License-Identifier: Apache-2.0
"""BERT and T5: two heads, an encoder beside a decoder, padding, and several losses."""

from pathlib import Path

import pytest

from tests.integration.jobs import TP, check

SCRIPT = Path(__file__).with_name("masked.py")
T5 = "--decoder-seq-length 8"
TE = "--transformer-impl transformer_engine"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, f"--tensor-model-parallel-size 2 --bf16 --use-distributed-optimizer {TE}"),
        (2, f"--pipeline-model-parallel-size 2 {TE}"),
        (4, f"--tensor-model-parallel-size 2 --sequence-parallel {TE}"),
        (2, f"--tensor-model-parallel-size 2 {T5} {TE}"),
        (2, f"--tensor-model-parallel-size 2 --sequence-parallel --bf16 {T5}"),
        (2, f"--use-distributed-optimizer --overlap-grad-reduce {T5}"),
    ],
)
def test_healthy(ranks: int, words: str, tmp_path: Path) -> None:
    """Equivalent in every layout."""
    check(tmp_path, *words.split(), nproc=ranks, script=SCRIPT)


def test_a_fault_of_cross_attention_is_found(tmp_path: Path) -> None:
    """The decoder attends to the encoder's tokens in another order: only T5 has this module."""
    words, mistake = (*TP, *T5.split()), "encoder_in_another_order"
    checked = check(tmp_path, *words, code=1, script=SCRIPT, mistake=mistake)
    assert "cross_attention" in checked.summary.culprits[0].name
