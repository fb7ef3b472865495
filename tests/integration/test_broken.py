# SPDX-License-Identifier: Apache-2.0
"""Faults of state space layers, balanced routers, loss scales and deferred gradients are found."""

from pathlib import Path

import pytest

from megatron_ttrace.evaluation.matrix.configurations import configurations
from megatron_ttrace.trace.files import load_report
from tests.integration.jobs import ttrace

SCRIPT = Path(__file__).with_name("broken.py")
JOBS = {one.name: one for one in configurations()}


def check(fault, job, directory):
    """Exit code and culprits of a job of the matrix with a fault in it."""
    one = JOBS[job].case(directory)
    done = ttrace(
        *("check", "--quiet", "--ttrace-no-wandb", "--ttrace-dir", directory / "out"),
        *("--nproc-per-node", one.nproc, "--", SCRIPT, *one.arguments),
        cwd=directory,
        BROKEN=fault,
    )
    assert done.returncode == 1, done.stderr
    summary, _ = load_report(directory / "out")
    return [culprit.name for culprit in summary.culprits]


def test_a_state_space_layer(tmp_path):
    """The layer with the fault comes first."""
    culprits = check("decay_of_another_head", "tp2/hybrid/fp32", tmp_path)
    assert culprits[0].startswith("decoder.layers.0.mixer")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fault", "job", "place"),
    [
        ("filters_of_the_next_rank", "cp2/hybrid/fp32", "decoder.layers.0.mixer"),
        ("decay_of_another_head", "tp2-sp/hybrid/bf16", "decoder.layers.0.mixer"),
        ("squashed_twice", "sinkhorn-tp2-sp/moe-te/fp32", "decoder.layers.0.mlp.router"),
        ("squashed_twice", "sinkhorn-cp2/moe-te/bf16", "decoder.layers.0.mlp.router"),
        ("a_token_too_few", "capacity-ep2/moe-te/fp32", "decoder.layers.0.mlp.router"),
        ("twice_the_factor", "fused-router-tp2-sp/moe-te/fp32", "decoder.layers.0.mlp.router"),
        ("unscaled_by_another", "tp2/gpt-te/fp16", ""),
        ("unscaled_by_another", "dp4-zero-overlap/llama-te/fp16", ""),
        ("keys_of_another_head", "cp2/gdn-te/fp32", "decoder.layers.0.self_attention"),
        # The head is the embedding.
        ("a_microbatch_too_few", "defer-pp2/gpt-te/fp32", "embedding.word_embeddings"),
        ("padding_among_the_rows", "tp2-sp-etp2/moe-te/fp8-delayed", "decoder.layers.0.mlp"),
        ("two_documents_in_one", "packed-tp2-sp/llama-te/fp32", "decoder.layers.0.self_attention"),
        ("residual_without_a_gradient", "ep2-in-pieces/moe-te/bf16", "decoder.layers.1"),
        ("rows_of_other_tokens", "pp2-vpp2-ep2-in-pieces/moe-te/bf16", "decoder.layers.0.mlp"),
        (
            "weights_of_a_microbatch_too_few",
            "pp2-vpp2-ep2-in-pieces-mtp/moe-deep/bf16",
            "decoder.layers.2.mlp.experts",
        ),
        ("only_the_host_steps", "offload-half-dp2-zero/llama-te/bf16", ""),
        ("recomputed_from_half", "recompute-mlp-tp2/llama-te/fp32", "decoder.layers."),
    ],
)
def test_found(fault, job, place, tmp_path):
    """At the place, or right behind it."""
    culprits = check(fault, job, tmp_path)
    assert culprits[0].startswith(place), culprits
