# SPDX-License-Identifier: Apache-2.0
"""What did not act is told, what did act is not."""

import dataclasses
import math
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from megatron_ttrace.compare.configuration import RunConfig
from megatron_ttrace.compare.exercised import Observed, Requested, observe, share, unexercised
from megatron_ttrace.mcore import samples
from megatron_ttrace.run.answer import requested as asked
from megatron_ttrace.trace.captured import Place
from megatron_ttrace.trace.codec import CodecError
from megatron_ttrace.trace.outcomes import NotExercised, Reason, Unexercised
from megatron_ttrace.trace.records import ROOT, STEP_LEVEL, Kind, Outcome, RoutingIndex
from tests.compare.traces import reference_of, tolerances_of
from tests.placement.meshes import mesh_of
from tests.report.synthetic_report import make_verdict

BUSY = Observed(
    microbatches=8,
    norms=(2.5, 0.5),
    masks_loss=True,
    restarts_positions=True,
    hides_documents=True,
    tokens=(60, 64),
    experts=8,
    idle={"a.router": 0, "b.router": 0},
    dropped=3,
    gradients=9,
    updates=True,
)
EVERYTHING = Requested(
    clip=1.0,
    masks_ends=True,
    resets_positions=True,
    resets_attention=True,
    per_token_loss=True,
    seq_length=64,
    window=8,
    sparse=16,
    drops_tokens=True,
    sharded_optimizer=True,
    overlap=True,
    buckets=3,
    final_batch=16,
    micro_batch=2,
)
PP2_DP2 = mesh_of(0, 4, pp=2)
DP2 = mesh_of(0, 2)
TP2 = mesh_of(0, 2, tp=2)


def told(requested: Requested = EVERYTHING, observed: Observed = BUSY, mesh=PP2_DP2, verdicts=()):
    return {one.what for one in unexercised(requested, observed, mesh, verdicts)}


@pytest.mark.parametrize("mesh", [PP2_DP2, DP2, TP2, mesh_of(0, 2, cp=2)])
def test_a_job_that_uses_what_it_asks_for_is_told_nothing(mesh) -> None:
    """Every feature on, every one of them acting; and every feature off."""
    asked = dataclasses.replace(EVERYTHING, sharded_optimizer=mesh != TP2)
    assert told(asked, mesh=mesh) == set()
    assert told(Requested(), Observed(microbatches=8), mesh=mesh) == set()


WHAT = Unexercised


@pytest.mark.parametrize(
    ("asked", "seen", "mesh", "what", "numbers"),
    [
        ({}, {}, mesh_of(0, 1), WHAT.ONE_RANK, (1,)),
        ({"final_batch": 4}, {"microbatches": 2}, PP2_DP2, WHAT.SCHEDULE, (1, 2)),
        ({}, {"same_batches": True}, DP2, WHAT.DIFFERENT_DATA, (8,)),
        ({}, {}, TP2, WHAT.SHARDED_OPTIMIZER, (1,)),
        ({"buckets": 1}, {}, DP2, WHAT.BUCKETS, (1,)),
        ({"dropout": True}, {}, DP2, WHAT.DROPOUT, ()),
        ({"random_routing": True}, {}, DP2, WHAT.RANDOM_ROUTING, ()),
        ({"mlp_chunks": True}, {}, DP2, WHAT.MLP_CHUNKS, ()),
        ({"scales_loss": True}, {}, DP2, WHAT.OVERFLOW, ()),
        ({"hidden_loss": 1e-3}, {}, DP2, WHAT.BALANCING_LOSS, (1e-3,)),
        ({"fp8_weights": True}, {}, DP2, WHAT.FP8_WEIGHTS, ()),
        ({"switched_off": ("a", "b")}, {}, DP2, WHAT.SWITCHED_OFF, (None, None, ("a", "b"))),
        ({}, {"masks_loss": False}, DP2, WHAT.LOSS_MASK, ()),
        ({}, {"restarts_positions": False}, DP2, WHAT.POSITION_RESET, ()),
        ({}, {"hides_documents": False}, DP2, WHAT.ATTENTION_RESET, ()),
        ({}, {"tokens": (64, 64)}, DP2, WHAT.TOKEN_WEIGHTS, (64,)),
        ({"window": 63}, {}, DP2, WHAT.WINDOW, (63, 64)),
        ({"sparse": 64}, {}, DP2, WHAT.SPARSE_ATTENTION, (64, 64)),
        ({"final_batch": 32}, {}, DP2, WHAT.RAMP_UP, (16, 32)),
        ({}, {"idle": {"a": 0, "b": 2}}, DP2, WHAT.IDLE_EXPERTS, (2, 8, ("b",))),
        ({}, {"dropped": 0}, DP2, WHAT.CAPACITY, ()),
        ({}, {"norms": (0.3, 1.0)}, DP2, WHAT.CLIP, (1.0, 1.0)),
        ({}, {"zero_gradients": ("w",)}, DP2, WHAT.GRADIENTS, (1, 9, ("w",))),
        ({}, {"updates": False}, DP2, WHAT.UPDATE, ()),
        # Not asked for.
        ({"clip": 0.0}, {"norms": (0.3,)}, DP2, None, ()),
        ({"masks_ends": False}, {"masks_loss": False}, DP2, None, ()),
        ({"overlap": False, "buckets": 1}, {}, DP2, None, ()),
        ({"drops_tokens": False}, {"dropped": 0}, DP2, None, ()),
        ({"final_batch": 0}, {"microbatches": 2}, DP2, None, ()),
        # Not known.
        ({}, {"masks_loss": None, "hides_documents": None}, DP2, None, ()),
        ({}, {"restarts_positions": None, "norms": ()}, DP2, None, ()),
        ({}, {"norms": (math.nan,)}, DP2, None, ()),
        ({}, {"norms": (0.5, math.inf)}, DP2, None, ()),
        ({}, {"dropped": None, "updates": None, "tokens": ()}, DP2, None, ()),
        ({"buckets": 0}, {}, DP2, None, ()),
        # A later stage of a pipeline has one bucket on purpose.
        ({"buckets": 1}, {}, PP2_DP2, None, ()),
        # Clipped in one of the steps.
        ({}, {"norms": (0.5, 1.01)}, DP2, None, ()),
    ],
)
def test_a_feature_that_did_not_act(asked, seen, mesh, what, numbers) -> None:
    """Its record, with its numbers, and nothing else; nothing without cause."""
    requested = dataclasses.replace(EVERYTHING, **asked)
    found = unexercised(requested, dataclasses.replace(BUSY, **seen), mesh)
    assert found == ((NotExercised(what, *numbers),) if what else ())


def verdicts(unchecked: int, passed: int, given: int = 0):
    """Verdicts of a step; ``given`` of them are of tensors that nothing computes."""
    blind = make_verdict("a", Kind.OUTPUT, verdict=Outcome.UNCHECKED, note="blind: much")
    start = make_verdict("a", Kind.PARAM, verdict=Outcome.UNCHECKED)
    good = make_verdict("a", Kind.OUTPUT, verdict=Outcome.PASS)
    return [blind] * unchecked + [good] * passed + [start] * given


def test_the_share_is_of_computed_tensors() -> None:
    """Start values are given, nothing needs some gradients; more than 1 % is told."""
    needless = make_verdict(
        "a", Kind.GRAD_INPUT, verdict=Outcome.UNCHECKED, reason=Reason.UNTRAINED
    )
    assert share([*verdicts(1, 3, 5), needless]) == (1, 4)
    assert told(verdicts=verdicts(1, 99, 50)) == set()
    found = unexercised(EVERYTHING, BUSY, DP2, verdicts(2, 98, 50))
    assert found == (NotExercised(Unexercised.UNCHECKED, 2, 100),)


@pytest.mark.parametrize(("checked", "names"), [(0, ("param_delta",)), (1, None)])
def test_a_kind_of_which_most_are_unchecked(checked, names) -> None:
    """Updates are few of all tensors."""
    update = make_verdict("a", Kind.PARAM_DELTA, verdict=Outcome.UNCHECKED)
    good = dataclasses.replace(update, verdict=Outcome.PASS)
    found = unexercised(EVERYTHING, BUSY, DP2, [*verdicts(0, 200), update, *[good] * checked])
    total = 201 + checked
    expected = NotExercised(Unexercised.UNCHECKED, 1, total, names) if names else None
    assert found == tuple(filter(None, [expected]))


def observed(directory: Path, tensors: dict[Place, torch.Tensor]) -> Observed:
    reference = reference_of(directory, tensors)
    return observe(reference, tolerances_of(reference), EVERYTHING)


def causal(boundary: int = 0) -> torch.Tensor:
    """Megatron's mask of a sample of four tokens; a document ends before ``boundary``."""
    seen = torch.tril(torch.ones(1, 1, 4, 4))
    seen[..., boundary:, :boundary] = 0
    return seen < 0.5


@pytest.mark.parametrize("acts", [False, True])
def test_batches_are_read(tmp_path: Path, acts: bool) -> None:
    """Masks and positions act if they do in any of the microbatches."""
    trace: dict[Place, torch.Tensor] = {}
    for number in range(2):
        second = acts and number == 1
        mask, positions = torch.ones(1, 4), torch.arange(4)[None]
        if second:
            mask[0, 1] = 0.0
            positions = torch.tensor([[0, 1, 0, 1]])
        trace[number, Kind.TOKENS, "tokens", 0] = torch.full((1, 4), 5 + second)
        trace[number, Kind.TOKENS, "loss_mask", 0] = mask
        trace[number, Kind.TOKENS, "position_ids", 0] = positions
        trace[number, Kind.TOKENS, "attention_mask", 0] = causal(2 if second else 0)
    found = observed(tmp_path, trace)
    assert found.microbatches == 2
    assert (found.masks_loss, found.restarts_positions, found.hides_documents) == (acts,) * 3
    assert found.same_batches is not acts
    assert found.tokens == ((4, 3) if acts else (4, 4))


def test_what_a_script_masks_itself(tmp_path: Path) -> None:
    """A token without a gradient does not count, if the model returns the losses of tokens."""
    trace: dict[Place, torch.Tensor] = {}
    for number, size in enumerate((4, 4, 5)):
        trace[number, Kind.TOKENS, "loss_mask", 0] = torch.ones(1, 4)
        gradient = torch.ones(1, size)
        gradient[0, number:] = 0.0
        trace[number, Kind.GRAD_OUTPUT, ROOT, 0] = gradient
    found = observed(tmp_path, trace)
    assert (found.tokens, found.masks_loss) == ((0, 1, 4), True)


@pytest.mark.parametrize(("field", "expected"), [("labels", False), ("cu_seqlens", None)])
def test_a_batch_without_a_mask(tmp_path: Path, field: str, expected: bool | None) -> None:
    """Megatron's data set then separates no documents; another may do so by other means."""
    trace: dict[Place, torch.Tensor] = {}
    trace[0, Kind.TOKENS, "tokens", 0] = torch.zeros(1, 4)
    trace[0, Kind.TOKENS, field, 0] = torch.zeros(1, 4)
    found = observed(tmp_path, trace)
    assert found.hides_documents is expected
    assert (found.masks_loss, found.restarts_positions, found.tokens) == (None, None, ())
    assert not found.same_batches


def test_experts_are_counted_over_the_step(tmp_path: Path) -> None:
    """An expert that one of two microbatches feeds is not idle."""
    trace: dict[Place, torch.Tensor] = {}
    for number, choice in enumerate([[[0, 1], [1, 0]], [[2, 0], [2, 0]]]):
        trace[number, Kind.ROUTING, "mlp.router", RoutingIndex.SCORES] = torch.rand(2, 4)
        trace[number, Kind.ROUTING, "mlp.router", RoutingIndex.CHOICE] = torch.tensor(choice)
        trace[number, Kind.ROUTING, "mlp.experts", 0] = torch.zeros(4 - number, 2)
        # Keys that sparse attention selects are no experts.
        trace[number, Kind.ROUTING, "core_attention", RoutingIndex.SCORES] = torch.zeros(4, 9)
        trace[number, Kind.ROUTING, "core_attention", RoutingIndex.CHOICE] = torch.zeros(4, 2)
    found = observed(tmp_path, trace)
    assert (found.experts, found.idle, found.dropped) == (4, {"mlp.router": 1}, 1)


@pytest.mark.parametrize(("kept", "dropped"), [([[1, 1], [1, 1]], 0), ([[1, 1], [0, 1]], 1)])
def test_experts_padded_to_their_capacity(
    tmp_path: Path, kept: list[list[int]], dropped: int
) -> None:
    """Their rows say nothing about the tokens that were dropped: the router's map does."""
    trace: dict[Place, torch.Tensor] = {}
    choice = torch.tensor([[0], [0]])
    trace[0, Kind.ROUTING, "mlp.router", RoutingIndex.SCORES] = torch.rand(2, 2)
    trace[0, Kind.ROUTING, "mlp.router", RoutingIndex.CHOICE] = choice
    trace[0, Kind.ROUTING, "mlp.router", RoutingIndex.KEPT] = torch.tensor(kept).bool()
    trace[0, Kind.ROUTING, "mlp.experts", 0] = torch.zeros(2, 1)
    assert observed(tmp_path, trace).dropped == dropped


def test_gradients_and_updates(tmp_path: Path) -> None:
    """Zero gradients by name; one update is enough."""
    trace: dict[Place, torch.Tensor] = {}
    for name, value in (("a", 0.0), ("b", 1.0)):
        trace[STEP_LEVEL, Kind.MAIN_GRAD, name, 0] = torch.full((3,), value)
        trace[STEP_LEVEL, Kind.PARAM_DELTA, name, 0] = torch.full((3,), value)
    trace[STEP_LEVEL, Kind.GRAD_NORM, "grad_norm", 0] = torch.tensor(0.25)
    found = observed(tmp_path, trace)
    assert (found.gradients, found.zero_gradients, found.updates) == (2, ("a",), True)
    assert found.norms == (0.25,)


ARGS = Namespace(
    hidden_dropout=0.0,
    attention_dropout=0.1,
    clip_grad=1.0,
    eod_mask_loss=True,
    reset_position_ids=False,
    reset_attention_mask=False,
    calculate_per_token_loss=False,
    seq_length=64,
    window_size=(16, 0),
    experimental_attention_variant=None,
    dsa_indexer_topk=2048,
    moe_expert_capacity_factor=None,
    use_distributed_optimizer=True,
    overlap_grad_reduce=True,
    rampup_batch_size=None,
    global_batch_size=8,
    micro_batch_size=2,
)


@pytest.mark.parametrize(
    ("options", "final"),
    [
        ({}, 0),
        ({"rampup_batch_size": ["2", "2", "8"]}, 8),
        ({"step_batch_size_schedule": "0:4 250B:32"}, 32),
        ({"step_batch_size_schedule": "0:4"}, 0),
    ],
)
def test_the_batch_grows(
    options: dict[str, object], final: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over samples, or in steps."""
    monkeypatch.setattr(samples, "has_ramp", lambda: True)
    assert asked(Namespace(**{**vars(ARGS), **options}), []).final_batch == final


@pytest.mark.parametrize(("pattern", "selected"), [("MD-", 2048), ("M*-", 0)])
def test_sparse_layers_of_a_hybrid_model(pattern: str, selected: int) -> None:
    """They need no option of their own."""
    args = Namespace(**{**vars(ARGS), "hybrid_layer_pattern": pattern})
    assert asked(args, []).sparse == selected


def test_arguments_survive_the_configuration() -> None:
    """A saved candidate asks for what the running one asked for."""
    chunk = Namespace(bucket_groups=[1, 2], expert_parallel_bucket_groups=[3])
    requested = asked(ARGS, [chunk, Namespace()])
    assert requested == Requested(
        dropout=True,
        clip=1.0,
        masks_ends=True,
        seq_length=64,
        window=16,
        sharded_optimizer=True,
        overlap=True,
        buckets=3,
        micro_batch=2,
    )
    assert RunConfig.from_json({"requested": requested.to_json()}).requested == requested
    assert RunConfig.from_json({}).requested == Requested()


@pytest.mark.parametrize("damaged", ["x", [], {"clip": "1"}, {"window": 1.5}, {"overlap": 1}])
def test_a_damaged_configuration_is_refused(damaged) -> None:
    with pytest.raises(CodecError, match="requested"):
        RunConfig.from_json({"requested": damaged})
