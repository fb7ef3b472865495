# SPDX-License-Identifier: Apache-2.0
"""Mistakes planted in Megatron are found: where each is, or what it was counted wrong for."""

import pytest

from megatron_ttrace.trace.files import load_report
from megatron_ttrace.trace.findings import Cause
from megatron_ttrace.trace.outcomes import Reason
from megatron_ttrace.trace.records import (
    BufferIndex,
    Direction,
    Kind,
    MetricIndex,
    Outcome,
    Result,
)
from megatron_ttrace.trace.store import TraceReader
from tests.assay.planted.mistakes import load
from tests.integration.jobs import PP, TP, ZERO, check

LOGGED = ("--log-num-zeros-in-grad", "--log-params-norm", "--untie-embeddings-and-output-weights")
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
SP = (*TP, "--sequence-parallel", "--global-batch-size", "6")
EMBEDDING, ROUTER, HEAD = (
    *("embedding.word_embeddings.weight", "decoder.layers.1.mlp.router", "output_layer"),
)
ALWAYS = ("decay_of_another_head", "weight_of_the_first_step", "zero_stale_parameter")
MICROBATCHES = "3.000 times too large = the number of microbatches"


# --- of one rank, of one layout, or in features that few layouts have ---------------------------


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ALWAYS else pytest.mark.nightly)
        for name, mistake in load().items()
        if mistake.job
    ],
)
def test_a_job(name, tmp_path):
    """At the place, or right behind it."""
    mistake = load()[name]
    nproc, words = mistake.arguments(tmp_path)
    checked = check(tmp_path, *words, model=(), nproc=nproc, code=1, mistake=name)
    assert checked.summary.culprits[0].name.startswith(mistake.place)


@pytest.mark.parametrize(
    "name", ["position_ids", pytest.param("labels", marks=pytest.mark.nightly)]
)
def test_a_wrong_input(name, tmp_path):
    """It is the only culprit, with the name of the argument, and not the modules that use it."""
    checked = check(tmp_path, *TP, code=1, mistake=name)
    (culprit,) = checked.summary.culprits
    assert (culprit.name, culprit.kind) == (f"model.{name}", Kind.INPUT)
    assert culprit.direction is Direction.START
    assert culprit.shown_by(checked.verdicts).name == "model"


def test_noise_of_no_seed(tmp_path):
    """Not equivalent because its tolerances are wide: too much is unchecked for this reason."""
    checked = check(tmp_path, *TP, code=2, mistake="noise_of_no_seed")
    noisy = [one.name for one in checked.verdicts if one.reason is Reason.NONDETERMINISTIC]
    assert "decoder.layers.1.mlp" in noisy
    assert not checked.failed
    (notice,) = [text for text in checked.summary.notices if "not deterministic" in text]
    assert "decoder.layers.1.mlp output" in notice


def test_what_is_recomputed(tmp_path):
    """It is compared, too: not its gradients are wrong first."""
    checked = check(tmp_path, *TP, *RECOMPUTED, code=1, mistake="recompute_other_input")
    (culprit,) = checked.summary.culprits
    assert (culprit.name, culprit.kind) == ("decoder.layers.0", Kind.INPUT)
    assert culprit.cause is Cause.RECOMPUTED
    functions = [one.function for one in culprit.places]
    assert functions[0] == "recompute_other_input"
    assert "checkpointed_forward" in functions


# --- in what is counted and logged --------------------------------------------------------------


def test_a_logged_number(tmp_path):
    """The number of zeros is twice the reference's; which elements were counted is right."""
    checked = check(tmp_path, *TP, *LOGGED, code=1, mistake="zeros_twice")
    assert [(one.name, one.kind) for one in checked.summary.culprits] == [
        ("num-zeros", Kind.METRIC)
    ]
    assert [one.name for one in checked.failed] == ["num-zeros"]


def test_an_overlapped_gather(tmp_path):
    """It runs in the first step, although Megatron's own first step makes none.

    No cause is known: the job is checked again, with modules isolated.
    """
    checked = check(tmp_path, *ZERO, code=1, mistake="remains_of_a_gather", once=False)
    isolated, _ = load_report(checked.out.with_name("ttrace-out-isolated"))
    assert isolated.verdict is Result.DIVERGED
    assert {one.direction for one in checked.failed} == {Direction.GRADIENT, Direction.UPDATE}


@pytest.mark.nightly
def test_a_gather_that_is_left_out(tmp_path):
    """What the forward pass would have gathered is not there before: one cause, with its code."""
    culprits = check(tmp_path, *ZERO, code=1, mistake="never_gathered").summary.culprits
    assert {one.cause for one in culprits} == {Cause.NOT_GATHERED}
    assert len({one.group for one in culprits}) == 1
    assert "param_and_grad_buffer.py" in culprits[0].where


def test_a_reduction(tmp_path):
    """Gradients that stay on their ranks: one culprit, not one per module."""
    checked = check(tmp_path, code=1, mistake="bucket_skipped")
    (culprit,) = checked.summary.culprits
    assert (culprit.name, culprit.kind) == (EMBEDDING, Kind.COUNTED)
    assert culprit.cause is Cause.NEVER_COUNTED
    assert "the reduction of gradients" in culprit.explanation
    wrong = [one.name for one in checked.failed if one.kind is Kind.COUNTED]
    gradients = [one.name for one in checked.verdicts if one.kind is Kind.MAIN_GRAD]
    assert wrong == list(dict.fromkeys(gradients))


def test_hyperparameters(tmp_path):
    """Parameters in a group with another learning rate: the group is named, with both values."""
    checked = check(tmp_path, *TP, code=1, mistake="another_group")
    culprits = checked.summary.culprits
    assert {one.cause for one in culprits} == {Cause.HYPERPARAMETERS}
    assert len({one.group for one in culprits}) == 1
    wrong = [one for one in checked.verdicts if one.kind is Kind.HYPERPARAMETERS]
    assert "decoder.final_layernorm.weight" in {one.name for one in wrong}
    assert {one.ranks for one in wrong} == {(1,)}


def test_what_a_step_leaves(tmp_path):
    """Mistakes that change the second step only show in what the first one leaves behind."""
    biased = (
        *("--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"),
        *("--moe-router-dtype", "fp32"),
    )
    checked = check(tmp_path, *MOE, *biased, code=1, mistake="sums_and_counts_kept")
    biases = {f"decoder.layers.{layer}.mlp.router.expert_bias" for layer in range(2)}
    wrong = {(one.kind, one.index): set() for one in checked.failed}
    for one in checked.failed:
        wrong[one.kind, one.index].add(one.name)
    assert wrong[Kind.BUFFER, BufferIndex.LOADS] == biases
    reference = TraceReader(checked.out / "reference")
    before = [
        key for key in reference if (key.kind, key.index) == (Kind.BUFFER, BufferIndex.BEFORE)
    ]
    assert {key.name for key in before} == biases
    assert all(reference.data(key).any() for key in before)
    assert wrong[Kind.METRIC, MetricIndex.LEFT] == {"load_balancing_loss", "z_loss"}
    assert {kind for kind, _ in wrong} == {Kind.BUFFER, Kind.METRIC}
    assert [index for kind, index in wrong if kind is Kind.METRIC] == [MetricIndex.LEFT]


@pytest.mark.nightly
def test_gradients_of_an_earlier_step(tmp_path):
    """They are found in the first step, too: all gradients are off, and nothing before them."""
    wrong = {one.kind for one in check(tmp_path, code=1, mistake="gradients_kept").failed}
    assert Kind.MAIN_GRAD in wrong
    assert not wrong & {Kind.OUTPUT, Kind.LOSS, Kind.GRAD_INPUT, Kind.GRAD_OUTPUT}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("mistake", "words", "name", "cause"),
    [
        ("bucket_twice", (), EMBEDDING, Cause.COUNTED_TWICE),
        ("bucket_twice", ("--use-distributed-optimizer",), EMBEDDING, Cause.COUNTED_TWICE),
        ("first_not_stepped", (), EMBEDDING, Cause.NEVER_COUNTED),
        ("embedding_on_both_stages", PP, EMBEDDING, Cause.COUNTED_TWICE),
        (
            *("small_parameters_on_every_rank", TP),
            *("decoder.layers.0.input_layernorm.weight", Cause.COUNTED_TWICE),
        ),
        ("stages_apart", PP, EMBEDDING, Cause.NEVER_COUNTED),
        (
            *("another_norm_for_experts", ("--expert-model-parallel-size", "2", *MOE)),
            *("decoder.layers.0.mlp.experts.linear_fc1.weight0", Cause.OTHER_NORM),
        ),
    ],
)
def test_elements(mistake, words, name, cause, tmp_path):
    """One culprit, with the name of the first parameter and the others in its explanation."""
    checked = check(tmp_path, *words, code=1, mistake=mistake)
    assert [(one.name, one.kind, one.cause) for one in checked.summary.culprits] == [
        (name, Kind.COUNTED, cause)
    ]
    wrong = [one for one in checked.failed if one.kind is Kind.COUNTED]
    assert {one.reason for one in wrong} == {Reason(cause.replace("_", " "))}


@pytest.mark.nightly
def test_numbers_that_are_lost(tmp_path):
    """A run that logs nothing lacks each number of the reference's."""
    checked = check(tmp_path, *TP, code=1, mistake="nothing_logged")
    assert {(one.kind, one.verdict) for one in checked.failed} == {(Kind.METRIC, Outcome.MISSING)}
    assert {one.name for one in checked.summary.culprits} == {one.name for one in checked.failed}


@pytest.mark.nightly
def test_logged_losses(tmp_path):
    """They are a sum over ranks that each have the whole."""
    words = (*TP, "--sequence-parallel", *MOE)
    summary = check(tmp_path, *words, code=1, mistake="auxiliary_loss_logged_per_rank").summary
    assert {one.name for one in summary.culprits} == {"load_balancing_loss", "z_loss"}


# --- in one of several losses -------------------------------------------------------------------

AUXILIARY = "the auxiliary loss's share of the gradient is 2.000 times too large = the size of tp"


def test_an_auxiliary_loss(tmp_path):
    """It is added by every tensor-parallel rank."""
    checked = check(tmp_path, *SP, *MOE, code=1, mistake="auxiliary_loss_of_every_rank")
    (culprit,) = checked.summary.culprits
    assert (culprit.name, culprit.kind) == (ROUTER, Kind.GRAD_INPUT)
    assert (culprit.cause, culprit.axes) == (Cause.TOO_LARGE, ("tp",))
    assert culprit.explanation.startswith(f"{AUXILIARY}, ")
    assert (checked.out / "replay.log").exists()
    assert not [*checked.out.glob(".shares-*")]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("mistake", "words", "name", "explanation"),
    [
        (
            *("losses_of_every_microbatch", MOE, ROUTER),
            f"the auxiliary loss's and the z loss's shares of the gradient are {MICROBATCHES}",
        ),
        ("no_z_loss", MOE, ROUTER, "the z loss's share of the gradient is missing"),
        ("head_without_mtp", MTP, HEAD, "the MTP loss's share of the gradient is missing"),
        # Both runs have three microbatches: their number alone is no reason.
        ("mtp_of_every_microbatch", MTP, HEAD, "3.000 times too large, a constant factor"),
        (
            *("auxiliary_loss_of_every_rank", (*MOE, "--bf16", "--moe-aux-loss-coeff", "0.5")),
            *(ROUTER, AUXILIARY),
        ),
        (
            *("no_z_loss", (*MOE, "--ttrace-isolate"), ROUTER),
            "the z loss's share of the gradient is missing",
        ),
        (
            *("no_z_loss_in_the_second_step", (*MOE, "--ttrace-iterations", "1-2"), ROUTER),
            "the z loss's share of the gradient is missing",
        ),
        ("auxiliary_loss_of_the_first_layer", MOE, ROUTER, AUXILIARY),
    ],
)
def test_other_losses(mistake, words, name, explanation, tmp_path):
    """Lost, or off by a number; in 16 bits, isolated, in a later step, and below other layers."""
    is_other_run = words not in (MOE, MTP) or mistake.endswith("first_layer")
    culprits = check(tmp_path, *SP, *words, code=1, mistake=mistake).summary.culprits
    assert is_other_run or len(culprits) == 1
    names = {one.name.partition("#")[0] for one in culprits}
    # In other steps and in 16 bits a router below may be off as well.
    assert names == {name} or (is_other_run and names <= {ROUTER, "decoder.layers.0.mlp.router"})
    assert all(one.explanation.startswith(explanation) for one in culprits)


DROPOUT = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
RECOMPUTED = (
    *("--recompute-granularity", "full", "--recompute-method", "uniform"),
    *("--recompute-num-layers", "1"),
)


@pytest.mark.parametrize(
    ("mistake", "words", "name", "explanation", "place"),
    [
        (
            *("embedding_drops_per_rank", TP, "embedding.embedding_dropout"),
            "dropout draws different masks on tensor-parallel ranks that hold the same elements",
            "LanguageModelEmbedding.forward",
        ),
        (
            *("random_states_of_the_backward_pass", (*SP, *RECOMPUTED)),
            "decoder.layers.0.self_attention.core_attention.attention_dropout",
            "dropout draws another mask in the recomputation than in the forward pass",
            "CheckpointFunction.backward",
        ),
        pytest.param(
            *("random_states_are_left", (*SP, *RECOMPUTED), "embedding.embedding_dropout"),
            "dropout draws a mask that it has drawn before in the step",
            "CheckpointFunction.backward",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_dropout(mistake, words, name, explanation, place, tmp_path):
    """It is off, and yet its masks are followed."""
    (culprit, *_) = check(tmp_path, *words, *DROPOUT, code=1, mistake=mistake).summary.culprits
    assert (culprit.name, culprit.explanation) == (name, explanation)
    assert place in {one.function for one in culprit.places}
