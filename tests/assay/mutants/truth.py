# SPDX-License-Identifier: Apache-2.0
"""What a right diagnosis of a mutant is, decided without the checker: docs/mutants.md, *Scores*."""

import re
from collections.abc import Sequence

from megatron_ttrace.trace.findings import Cause
from megatron_ttrace.trace.records import ROOT, Culprit, Kind
from tests.assay.mutants import scan
from tests.assay.mutants.coverage import folded
from tests.assay.mutants.records import Mutant, Phase, Ran

_PHASES = {
    "megatron.core.distributed": Phase.GRADIENTS,
    "megatron.core.optimizer": Phase.OPTIMIZER,
    "megatron.core.pipeline_parallel": Phase.SCHEDULE,
}


def watched() -> dict[str, Phase | None]:
    """All files whose code is recorded, with the phase of what runs outside of the model."""
    phases: dict[str, Phase | None] = dict.fromkeys(map(str, scan.autograd_files()))
    for module, path in scan.modules():
        names = (name for name in _PHASES if f"{module}.".startswith(f"{name}."))
        phases[str(path)] = next(map(_PHASES.get, names), None)
    return phases


_ACTIVATIONS = {Kind.INPUT, Kind.OUTPUT, Kind.GRAD_OUTPUT, Kind.GRAD_INPUT}
_KINDS = {
    Phase.SETUP: {Kind.INITIAL, Kind.PARAM},
    Phase.SCHEDULE: {Kind.TOKENS, Kind.LOSS},
    Phase.GRADIENTS: {Kind.INITIAL, Kind.PARAM, Kind.MAIN_GRAD, Kind.COUNTED, Kind.BUFFER},
    Phase.OPTIMIZER: {
        *(Kind.COUNTED, Kind.GRAD_NORM, Kind.PARAM_DELTA, Kind.EXP_AVG, Kind.EXP_AVG_SQ),
        *(Kind.PARAM, Kind.METRIC, Kind.HYPERPARAMETERS),
    },
    Phase.LOGGING: {Kind.METRIC},
}
"""What code of a phase makes. Parameters lie in the buffers of their gradients."""
_BOUNDARY = re.compile(
    rf"{ROOT}|embedding|decoder|decoder\.layers\.\*|decoder\.final_layernorm|output_layer|mtp"
    r"|mtp\.layers\.\*"
)
"""What can be the first or the last of a pipeline stage."""
_SYNC = re.compile(r"sync|finalize_model_grads|\btotal_num_tokens\b")
"""What a schedule does for the reduction of gradients: it starts it, and counts their divisor."""
_EMPTIES = re.compile(r"zero_grad")
_LOGGED = re.compile(r"log|metric|track")
_NO_MODULE = (Kind.GRAD_NORM, Kind.METRIC, Kind.TOKENS)


def first_group(culprits: Sequence[Culprit]) -> list[Culprit]:
    """The first culprit and those of its group."""
    first, others = culprits[:1], culprits[1:]
    return [*first, *(c for c in others if c.group and c.group == first[0].group)]


def right_module(mutant: Mutant, ran: Ran, culprits: Sequence[Culprit]) -> bool:
    """Whether the first culprit, or one of its group, is where the mutated function ran."""
    phases = set(ran.phases)
    if Phase.SCHEDULE in phases and _SYNC.search(mutant.statement):
        phases.add(Phase.GRADIENTS)
    if _EMPTIES.search(mutant.qualname):
        # Before the step: the gradients are then added to what is left.
        phases.add(Phase.GRADIENTS)
    if _LOGGED.search(f"{mutant.qualname} {mutant.statement}"):
        phases.add(Phase.LOGGING)
    return any(
        any(_belongs(culprit, phase) for phase in phases)
        or (
            culprit.kind not in _NO_MODULE
            and any(_related(folded(culprit.name), name) for name in ran.modules)
        )
        for culprit in first_group(culprits)
    )


def _related(name: str, other: str) -> bool:
    """Whether a module is another one, or directly contains it, or is directly in it."""
    return name == other or other == _container(name) or name == _container(other)


def _container(name: str) -> str:
    """The module around a module; a list of modules is none."""
    outer = name.rpartition(".")[0]
    return (outer.rpartition(".")[0] if name.endswith(".*") else outer) or ROOT


def _belongs(culprit: Culprit, phase: Phase) -> bool:
    if culprit.kind in _KINDS[phase]:
        return True
    if phase is Phase.OPTIMIZER:
        # A parameter that the optimizer does not hold has no main gradient.
        return culprit.kind is Kind.MAIN_GRAD and culprit.rel_err is None
    at_boundary = _BOUNDARY.fullmatch(folded(culprit.name))
    return phase is Phase.SCHEDULE and culprit.kind in _ACTIVATIONS and bool(at_boundary)


C = Cause
_FACTOR = {C.FACTOR, C.TOO_LARGE, C.TOO_SMALL}
_COUNTS = {C.COUNTED_TWICE, C.NEVER_COUNTED, C.OTHER_NORM}
_UNSUMMED = {C.PARTIAL, C.COPY, C.WEIGHTS, C.NEVER_COUNTED, C.OTHER_NORM}
"""Each rank keeps its own summand: replicas differ, or a share of a gradient or norm is missing."""
_MISPLACED = {C.OFFSET, C.ORDER, C.HALVES, C.ROWS}
"""Parts of a tensor are those of another rank, or in another order."""
_SCALED = {*_FACTOR, C.WEIGHTS, C.ADDEND, C.SOFTMAX_SCALE, C.HYPERPARAMETERS}
"""A tensor, or one of the terms that it is the sum of, is multiplied."""
_SHIFTED = {
    *_MISPLACED,
    *(C.TOKEN_IDS, C.ATTENTION_MASK, C.ATTENTION_BLOCK, C.OTHER_TIME, C.OTHER_MODULE),
    *(C.LAYERS, C.LAYER_NUMBERS, C.COUNTED_TWICE, C.NEVER_COUNTED),
}
"""A range is that of its neighbour: of rows, tokens, microbatches, layers, parameters."""

IMPLIED: dict[str, set[Cause]] = {
    # Without a reduction, _UNSUMMED; without a gather or an exchange, a rank's own part is where
    # another's belongs, or stays as it was in an earlier step: weights are not gathered.
    "drop-collective": {*_UNSUMMED, *_MISPLACED, C.OTHER_TIME, C.NOT_GATHERED},
    # Equal summands are added once more.
    "double-collective": {*_FACTOR, C.WEIGHTS, C.COUNTED_TWICE},
    # Summed over wrong ranks: the right sum is lost, and another is made.
    "wrong-group": {*_UNSUMMED, *_MISPLACED, *_FACTOR, *_COUNTS},
    "wrong-lookup": {*_UNSUMMED, *_MISPLACED, *_FACTOR, *_COUNTS},
    # Sum and mean differ by a size.
    "wrong-op": {*_FACTOR, C.WEIGHTS},
    "lost-scale": _SCALED,
    "double-scale": _SCALED,
    "lost-coefficient": _SCALED,
    "rank-share": {*_SCALED, C.COUNTED_TWICE},
    "off-by-one": _SHIFTED,
    "even-offset": _SHIFTED,
    # What was skipped is zero, as before, not reduced, not scaled, or in no sum.
    "skip-item": {C.ZERO, C.OTHER_TIME, *_UNSUMMED, *_FACTOR},
    # A buffer that is not filled is empty or as before (unreduced, or of another time), one that is
    # not emptied adds what it held, and a shared one has another tensor's values.
    "stale-buffer": {
        *(C.ZERO, C.OTHER_TIME, C.OTHER_MODULE, C.INITIAL_VALUES),
        *(C.PARTIAL, C.COPY, C.WEIGHTS, C.ADDEND),
    },
}
"""By operator, the causes that describe what it does to numbers."""

_MARKS: dict[str, set[Cause]] = {
    # Reduced over the ranks of dense parameters, or the reverse.
    "allreduce": {*_UNSUMMED, *_FACTOR, *_COUNTS},
    "average_gradients_across_tp_domain": {*_UNSUMMED, *_FACTOR},
    "is_embedding_or_output_parameter": {*_COUNTS, *_FACTOR},
    # Not summed over tensor-parallel ranks.
    "sequence_parallel": _UNSUMMED,
    # Copies on two pipeline stages: each counts, or is reduced alone.
    "shared": {*_COUNTS, *_UNSUMMED},
    "shared_embedding": {*_COUNTS, *_UNSUMMED},
    # Taken for a copy: counted on one rank only, initialised like one, whole on each rank.
    "tensor_model_parallel": {*_COUNTS, C.INITIAL_VALUES, C.DIVISION},
}
"""By lost mark."""

_AXES = {
    r"tp|tensor": {"tp", "etp"},
    r"pp|pipeline|embd": {"pp"},
    r"dp|data|cp|context|ep|expt|expert": {"dp", "edp", "cp", "ep", "etp"},
}
"""By words of a group's name, the axes that it can have."""
_ONE_COLLECTIVE = ("drop-collective", "double-collective", "wrong-op")


def implied(mutant: Mutant) -> set[Cause]:
    """The causes that describe what the change does to numbers."""
    if mutant.operator in ("lost-mark", "partial-mark"):
        return set().union(*(causes for mark, causes in _MARKS.items() if _word(mark, mutant)))
    return IMPLIED[mutant.operator]


def _word(word: str, mutant: Mutant) -> bool:
    return bool(re.search(rf"\b{word}\b", mutant.statement))


def right_cause(mutant: Mutant, culprits: Sequence[Culprit]) -> bool | None:
    """Whether the cause that is reported first is implied by the change; ``None`` without one.

    The sum of a collective is over the axes of its group, if the group's name says which.
    """
    first = next((c for c in first_group(culprits) if c.cause is not None), None)
    if first is None:
        return None
    if first.cause not in implied(mutant):
        return False
    axes = {"microbatches"}.union(
        *(
            some
            for words, some in _AXES.items()
            if re.search(rf"(^|[\W_])({words})(_\w+)?_group", mutant.fragment)
        )
    )
    known = mutant.operator in _ONE_COLLECTIVE and len(axes) > 1
    return not (known and first.axes) or bool(axes & set(first.axes))
