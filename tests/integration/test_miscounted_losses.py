# SPDX-License-Identifier: Apache-2.0
"""A gradient of which one loss's share is wrong: the loss is named, and by how much it is off."""

from pathlib import Path

import pytest

from megatron_ttrace.trace.files import load_report
from megatron_ttrace.trace.findings import Cause
from megatron_ttrace.trace.records import Kind
from tests.integration.jobs import TINY, ttrace

SCRIPT = Path(__file__).with_name("miscounted_losses.py")
TP = ("--tensor-model-parallel-size", "2", "--sequence-parallel", "--global-batch-size", "6")
EMULATED = ("--transformer-impl", "transformer_engine")
MOE = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-aux-loss-coeff", "1e-2"),
    *("--moe-router-load-balancing-type", "aux_loss", "--moe-z-loss-coeff", "1e-3"),
    *("--disable-bias-linear", "--moe-grouped-gemm", *EMULATED),
)
MTP = (
    *("--mtp-num-layers", "1", "--untie-embeddings-and-output-weights"),
    *("--position-embedding-type", "rope", *EMULATED),
)
ROUTER, HEAD = "decoder.layers.1.mlp.router", "output_layer"
MICROBATCHES = "3.000 times too large = the number of microbatches"


def culprits(fault, arguments, directory):
    """The culprits of a small job with a fault in it."""
    done = ttrace(
        *("check", "--quiet", "--ttrace-no-wandb", "--nproc-per-node", 2, "--", SCRIPT),
        *(*TINY, *arguments),
        cwd=directory,
        MISCOUNTED=fault,
    )
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-2000:]
    summary, _ = load_report(directory / "ttrace-out")
    assert not [*(directory / "ttrace-out").glob(".shares-*")]
    return summary.culprits


def test_an_auxiliary_loss(tmp_path):
    """It is added by every tensor-parallel rank."""
    (one,) = culprits("auxiliary_loss_of_every_rank", (*TP, *MOE), tmp_path)
    assert (one.name, one.kind, one.cause, one.axes) == (
        *(ROUTER, Kind.GRAD_INPUT, Cause.TOO_LARGE),
        ("tp",),
    )
    assert one.explanation.startswith(
        "the auxiliary loss's share of the gradient is 2.000 times too large = the size of tp, "
    )
    assert (tmp_path / "ttrace-out/replay.log").exists()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fault", "arguments", "name", "explanation"),
    [
        (
            *("losses_of_every_microbatch", MOE, ROUTER),
            f"the auxiliary loss's and the z loss's shares of the gradient are {MICROBATCHES}",
        ),
        ("no_z_loss", MOE, ROUTER, "the z loss's share of the gradient is missing"),
        ("head_without_mtp", MTP, HEAD, "the MTP loss's share of the gradient is missing"),
        ("mtp_of_every_microbatch", MTP, HEAD, MICROBATCHES),
    ],
)
def test_other_losses(fault, arguments, name, explanation, tmp_path):
    """Lost, or off by the number of microbatches; the head's own gradient for MTP is all of it."""
    (one,) = culprits(fault, (*TP, *arguments), tmp_path)
    assert one.name.partition("#")[0] == name
    assert one.explanation.startswith(explanation)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fault", "flags", "explanation"),
    [
        (
            *("auxiliary_loss_of_every_rank", ("--bf16", "--moe-aux-loss-coeff", "0.5")),
            "the auxiliary loss's share of the gradient is 2.000 times too large = the size of tp",
        ),
        (
            *("no_z_loss", ("--ttrace-isolate",)),
            "the z loss's share of the gradient is missing",
        ),
        (
            *("no_z_loss_in_the_second_step", ("--ttrace-iterations", "1-2")),
            "the z loss's share of the gradient is missing",
        ),
        (
            *("auxiliary_loss_of_the_first_layer", ()),
            "the auxiliary loss's share of the gradient is 2.000 times too large = the size of tp",
        ),
    ],
    ids=["bf16", "isolated", "later", "below"],
)
def test_in_other_runs(fault, flags, explanation, tmp_path):
    """In 16 bits; isolated; in a later step; in a layer below others, which add shares as well."""
    found = culprits(fault, (*TP, *MOE, *flags), tmp_path)
    assert {one.name for one in found} <= {"decoder.layers.0.mlp.router", ROUTER}
    assert all(one.explanation.startswith(explanation) for one in found)
