# SPDX-License-Identifier: Apache-2.0
"""Elements that are counted twice or never, and wrong numbers in Megatron's log, are found."""

from pathlib import Path

import pytest

from megatron_ttrace.trace.files import load_report
from megatron_ttrace.trace.findings import Cause
from megatron_ttrace.trace.records import LEFT, LOADS, Kind, Outcome, Reason
from tests.integration.jobs import TINY, ttrace

SCRIPT = Path(__file__).with_name("miscounted.py")
TP, PP = ("--tensor-model-parallel-size", "2"), ("--pipeline-model-parallel-size", "2")
LOGGED = ("--log-num-zeros-in-grad", "--log-params-norm", "--untie-embeddings-and-output-weights")
MOE = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-aux-loss-coeff", "1e-2"),
    *("--moe-router-load-balancing-type", "aux_loss", "--moe-z-loss-coeff", "1e-3"),
    *("--disable-bias-linear", "--moe-grouped-gemm", "--transformer-impl", "transformer_engine"),
)


def check(fault, arguments, directory):
    """Summary and verdicts of a small job with a fault in it."""
    done = ttrace(
        *("check", "--quiet", "--ttrace-no-wandb", "--nproc-per-node", 2, "--", SCRIPT),
        *(*TINY, *arguments),
        cwd=directory,
        MISCOUNTED=fault,
    )
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-2000:]
    return load_report(directory / "ttrace-out")


def test_a_logged_number(tmp_path):
    """The number of zeros is twice the reference's; which elements were counted is right."""
    summary, verdicts = check("zeros_twice", (*TP, *LOGGED), tmp_path)
    assert [(one.name, one.kind) for one in summary.culprits] == [("num-zeros", Kind.METRIC)]
    assert [one.name for one in verdicts if one.verdict.is_failure] == ["num-zeros"]


def test_a_reduction(tmp_path):
    """Gradients that stay on their ranks: one culprit, not one per module."""
    summary, verdicts = check("bucket_skipped", (), tmp_path)
    (culprit,) = summary.culprits
    assert (culprit.name, culprit.kind) == ("embedding.word_embeddings.weight", Kind.COUNTED)
    assert culprit.cause is Cause.NEVER_COUNTED
    assert "the reduction of gradients" in culprit.explanation
    wrong = [one.name for one in verdicts if one.kind is Kind.COUNTED and one.verdict.is_failure]
    assert wrong == list(dict.fromkeys(one.name for one in verdicts if one.kind is Kind.MAIN_GRAD))


def test_hyperparameters(tmp_path):
    """Parameters in a group with another learning rate: the group is named, with both values."""
    summary, verdicts = check("another_group", TP, tmp_path)
    assert {one.cause for one in summary.culprits} == {Cause.HYPERPARAMETERS}
    assert len({one.group for one in summary.culprits}) == 1
    wrong = [one for one in verdicts if one.kind is Kind.HYPERPARAMETERS]
    assert "decoder.final_layernorm.weight" in {one.name for one in wrong}
    assert {one.ranks for one in wrong} == {(1,)}


def test_what_a_step_leaves(tmp_path):
    """Faults that change the second step only show in what the first one leaves behind."""
    biased = (
        *("--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"),
        *("--moe-router-dtype", "fp32"),
    )
    _, verdicts = check("sums_and_counts_kept", (*MOE, *biased), tmp_path)
    wrong = {(one.name, one.kind, one.index) for one in verdicts if one.verdict.is_failure}
    biases = {f"decoder.layers.{layer}.mlp.router.expert_bias" for layer in range(2)}
    assert {name for name, kind, index in wrong if (kind, index) == (Kind.BUFFER, LOADS)} == biases
    logged = {"load_balancing_loss", "z_loss"}
    assert {(name, index) for name, kind, index in wrong if kind is Kind.METRIC} == {
        (name, LEFT) for name in logged
    }
    assert {kind for _, kind, _ in wrong} == {Kind.BUFFER, Kind.METRIC}


@pytest.mark.nightly
def test_gradients_of_an_earlier_step(tmp_path):
    """They are found in the first step, too: all gradients are off, and nothing before them."""
    _, verdicts = check("gradients_kept", (), tmp_path)
    wrong = {one.kind for one in verdicts if one.verdict.is_failure}
    assert Kind.MAIN_GRAD in wrong
    assert not wrong & {Kind.OUTPUT, Kind.LOSS, Kind.GRAD_INPUT, Kind.GRAD_OUTPUT}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fault", "arguments", "name", "cause"),
    [
        ("bucket_twice", (), "embedding.word_embeddings.weight", Cause.COUNTED_TWICE),
        (
            *("bucket_twice", ("--use-distributed-optimizer",)),
            *("embedding.word_embeddings.weight", Cause.COUNTED_TWICE),
        ),
        ("first_not_stepped", (), "embedding.word_embeddings.weight", Cause.NEVER_COUNTED),
        ("embedding_on_both_stages", PP, "embedding.word_embeddings.weight", Cause.COUNTED_TWICE),
        (
            *("small_ones_on_every_rank", TP),
            *("decoder.layers.0.input_layernorm.weight", Cause.COUNTED_TWICE),
        ),
        ("stages_apart", PP, "embedding.word_embeddings.weight", Cause.NEVER_COUNTED),
        (
            *("another_norm_for_experts", ("--expert-model-parallel-size", "2", *MOE)),
            *("decoder.layers.0.mlp.experts.linear_fc1.weight0", Cause.OTHER_NORM),
        ),
    ],
)
def test_elements(fault, arguments, name, cause, tmp_path):
    """One culprit, with the name of the first parameter and the others in its explanation."""
    summary, verdicts = check(fault, arguments, tmp_path)
    assert [(one.name, one.kind, one.cause) for one in summary.culprits] == [
        (name, Kind.COUNTED, cause)
    ]
    wrong = [one for one in verdicts if one.kind is Kind.COUNTED and one.verdict.is_failure]
    assert {one.reason for one in wrong} == {Reason(cause.replace("_", " "))}


@pytest.mark.nightly
def test_numbers_that_are_lost(tmp_path):
    """A run that logs nothing lacks each number of the reference's."""
    summary, verdicts = check("nothing_logged", TP, tmp_path)
    lost = [one for one in verdicts if one.verdict.is_failure]
    assert {(one.kind, one.verdict) for one in lost} == {(Kind.METRIC, Outcome.MISSING)}
    assert {one.name for one in summary.culprits} == {one.name for one in lost}


@pytest.mark.nightly
def test_an_auxiliary_loss(tmp_path):
    """The losses that are logged are a sum over ranks that each have the whole."""
    arguments = (*TP, "--sequence-parallel", *MOE)
    summary, _ = check("auxiliary_loss_per_rank", arguments, tmp_path)
    assert {one.name for one in summary.culprits} == {"load_balancing_loss", "z_loss"}
