# SPDX-License-Identifier: Apache-2.0
"""BERT and T5: two heads, an encoder beside a decoder, padding, and several losses."""

from pathlib import Path

import pytest

from tests.integration.jobs import TINY, ttrace

SCRIPT = Path(__file__).with_name("masked.py")
T5 = "--decoder-seq-length 8"
TE = "--transformer-impl transformer_engine"
FAULT = """
from megatron.core import parallel_state
from megatron.core.transformer.attention import CrossAttention

forward = CrossAttention.forward


def faulty(self, hidden_states, attention_mask, key_value_states=None, **more):
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        key_value_states = key_value_states.roll(1, 0)
    return forward(self, hidden_states, attention_mask, key_value_states, **more)


CrossAttention.forward = faulty
"""


def check(folder: Path, ranks: int, words: str, script: Path = SCRIPT):
    """One check of a tiny model."""
    return ttrace(
        *("check", "--quiet", "--ttrace-no-wandb", "--nproc-per-node", ranks, "--", script),
        *(*TINY, *words.split()),
        cwd=folder,
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, f"--tensor-model-parallel-size 2 --bf16 --use-distributed-optimizer {TE}"),
        (2, f"--pipeline-model-parallel-size 2 {TE}"),
        (
            4,
            f"--tensor-model-parallel-size 2 --sequence-parallel {TE}",
        ),
        (2, f"--tensor-model-parallel-size 2 {T5} {TE}"),
        (2, f"--tensor-model-parallel-size 2 --sequence-parallel --bf16 {T5}"),
        (2, f"--use-distributed-optimizer --overlap-grad-reduce {T5}"),
    ],
)
def test_healthy(ranks: int, words: str, tmp_path: Path) -> None:
    """Equivalent in every layout."""
    done = check(tmp_path, ranks, words)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_a_fault_of_cross_attention_is_found(tmp_path: Path) -> None:
    """The decoder attends to the encoder's tokens in another order: only T5 has this module."""
    script = tmp_path / "faulty.py"
    text = SCRIPT.read_text(encoding="utf-8")
    script.write_text(text.replace("\nTOKENS =", f"\n{FAULT}\nTOKENS ="), encoding="utf-8")
    done = check(tmp_path, 2, f"--tensor-model-parallel-size 2 {T5}", script)
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-2000:]
    assert "cross_attention" in done.stdout
