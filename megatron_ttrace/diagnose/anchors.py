# SPDX-License-Identifier: Apache-2.0
"""The function that surely had a part in what failed, and where else the fault may be."""

from megatron_ttrace.diagnose.code import BUILDING, Code
from megatron_ttrace.diagnose.start import WEIGHTS
from megatron_ttrace.mcore.roles import names_tokens
from megatron_ttrace.trace.collectives import ModuleCode, Sources
from megatron_ttrace.trace.counted import Statistic
from megatron_ttrace.trace.judged import Diagnosis, Judged
from megatron_ttrace.trace.modules import module_of
from megatron_ttrace.trace.records import ROOT, Direction, DropoutIndex, Kind, LoadedIndex, Outcome

_REFRESHES = "._copy_model_params_to_main_params"
"""What sets main weights if weights alone are loaded."""


def anchor_of(sources: Sources, verdict: Judged, ran: Code | None = None) -> str:
    """The function that surely had a part in making a tensor; empty if it is not known."""
    kind, direction, name = verdict.kind, verdict.direction, module_of(verdict.name)
    if (kind, name) == (Kind.INPUT, ROOT) or kind in (Kind.TOKENS, Kind.LOSS):
        return sources.step
    if kind is Kind.METRIC:
        # What is not logged here would be by what logs the others.
        return sources.metrics.get(name, next(iter(sources.metrics.values()), ""))
    if direction is Direction.UPDATE and kind is not Kind.BUFFER:
        return sources.optimizer
    if direction is Direction.GRADIENT:
        return "" if is_of_parameters(verdict) else sources.finalize
    code = sources.of(name) or sources.of(ROOT) or ModuleCode()
    if kind is Kind.LOADED:
        if verdict.index == LoadedIndex.NUMBER:
            return next((at for word, at in sources.loaders.items() if name.startswith(word)), "")
        if verdict.index == LoadedIndex.ROUNDED and ran is not None:
            built = (ran.functions[number] for number in ran.at[BUILDING])
            if refreshes := next((f.where for f in built if f.name.endswith(_REFRESHES)), ""):
                return refreshes
        is_module = verdict.index in (*WEIGHTS, LoadedIndex.BUFFER)
        return code.described if is_module else sources.optimizer_state
    if direction is Direction.START:
        return code.built
    if kind is Kind.GRAD_OUTPUT:
        return code.user
    return (direction is Direction.BACKWARD and code.backward) or code.forward


def is_of_parameters(verdict: Judged) -> bool:
    """The norm of all parameters is computed after the step, to be logged."""
    return verdict.kind is Kind.COUNTED and verdict.index == Statistic.PARAMS_NORM.number


def is_sent(diagnosis: Diagnosis) -> bool:
    """Whether a tensor is right on the ranks of a pipeline stage, and wrong on the next one's."""
    before, verdict = diagnosis.before, diagnosis.verdict
    of_module = verdict.kind in (Kind.INPUT, Kind.GRAD_OUTPUT)
    return of_module and before is not None and {*before.ranks}.isdisjoint(verdict.ranks)


def arrives(verdict: Judged) -> bool:
    """Whether the fault is in what a module is given.

    That is an input, which tokens an expert gets, or a gradient that nothing asks for: the input
    was cut off from the graph.
    """
    is_cut_off = verdict.kind is Kind.GRAD_INPUT and verdict.verdict is Outcome.MISSING
    return verdict.kind is Kind.INPUT or is_cut_off or names_tokens(verdict.key)


def is_redrawn(verdict: Judged) -> bool:
    """Whether a recomputation drew another dropout mask than the forward pass, or left its own."""
    index = verdict.index % len(DropoutIndex)
    return verdict.kind is Kind.DROPOUT and index == DropoutIndex.RECOMPUTED
