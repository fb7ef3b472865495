# SPDX-License-Identifier: Apache-2.0
"""A restarted run against the uninterrupted one: what was lost, in saving or in loading.

Both are recorded runs (``trace/recorded.py``). The order of comparisons is: the loaded state with
the saved one, and the stored state with both; the following steps; the state after them. A
difference of the loaded state explains all that follow, so these are compared only if there is
none.

The loaded state must be equal to the bit in every layout. The following steps must be in the same
layout, where the same step gives the same bits again; otherwise within ``SAFETY`` times what a
restart with perturbed steps moves (``compare/tolerance.py``).
"""

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Mapping

import torch

from megatron_ttrace.compare.tolerance import BLIND
from megatron_ttrace.saved.described import describing, nearest
from megatron_ttrace.saved.recorded import (
    VOCABULARY,
    Moves,
    Recorded,
    State,
    change,
    differing,
    distance,
    merged,
    same,
)
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.recorded import Point
from megatron_ttrace.trace.records import Result
from megatron_ttrace.trace.resumed import Blame, Difference, How, Logged, Restart, What
from megatron_ttrace.trace.sanitise import some_of
from megatron_ttrace.trace.states import SCHEDULED, SCHEDULER

type Stored = Callable[[What, str], torch.Tensor | None]
"""Reads the state of a parameter from the checkpoint; ``None`` where it has no logical form."""

_OF_OPTIMIZER = (What.MAIN, What.EXP_AVG, What.EXP_AVG_SQ, What.OTHER)
_ZERO_AT_FIRST = (What.EXP_AVG, What.EXP_AVG_SQ, What.OTHER)
"""State that an optimizer creates as zeros when it first needs it."""
_NUMBERS_OF_OPTIMIZER = ("param_groups", "opt_param_scheduler", "grad_scaler", "loss_scale")
_COUNT = ".step"
_WAYS = ("load", "save")
_NAMED = 3
"""Tensors that a notice lists."""
_BOOKKEEPING = "num_floating_point_operations_so_far"
"""A number that is only logged; it depends on the layout."""


def compare(
    before: Recorded,
    after: Recorded,
    layout: str,
    *,
    stored: Stored = lambda kind, name: None,
    numbers: Mapping[str, object] | None = None,
    moves: Moves | None = None,
) -> Restart:
    """Compare a restarted run with the uninterrupted one.

    ``layout`` are its flags, if its layout is another one; ``stored`` and ``numbers`` are what the
    checkpoint has; ``moves`` is how far rounding moves the following steps.

    Raises:
        TTraceError: when a record is missing or damaged.
    """
    comparison = _Comparison(before, after, layout, stored, numbers or {})
    comparison.loaded()
    if not comparison.differences:
        comparison.following(moves)
    comparison.settle()
    return comparison.answer()


class _Comparison:
    def __init__(
        self,
        before: Recorded,
        after: Recorded,
        layout: str,
        stored: Stored,
        numbers: Mapping[str, object],
    ) -> None:
        self._before, self._after = before, after
        self._layout = layout
        self._stored_tensor, self._stored_numbers = stored, numbers
        self._at = len(before.steps) - len(after.steps)
        self._compared = self._stored = 0
        self._notices: list[str] = []
        self.differences: list[Difference] = []
        self._suspects: list[Difference] = []
        self._same_samples = True
        self._otherwise: list[str] = []
        omitted = {name for rank in (*before.ranks, *after.ranks) for name in rank.omitted}
        self._without_optimizer, self._without_random = (
            ", ".join(f"--no-{word}-{what}" for word in _WAYS if f"no_{word}_{what}" in omitted)
            for what in ("optim", "rng")
        )
        self._described = {n: d for rank in before.ranks for n, d in rank.described.items()}
        self._names_stored = {name for rank in before.ranks for name in rank.stored}

    def answer(self) -> Restart:
        steps = []
        # What trains on other numbers by design shows nothing.
        for number in range(0 if self._other_numbers() else len(self._after.steps)):
            old, new = self._before.logged(self._at + number), self._after.logged(number)
            steps.append(
                Logged(
                    self._before.steps[self._at + number][0].iteration,
                    (next(iter(old[0].values()), None), next(iter(new[0].values()), None)),
                    (old[1], new[1]),
                )
            )
        return Restart(
            layout=self._layout,
            verdict=Result.DIVERGED if self.differences else Result.EQUIVALENT,
            compared=self._compared,
            stored=self._stored,
            otherwise=len(self._otherwise),
            differences=tuple(self.differences),
            steps=tuple(steps),
            notices=tuple(dict.fromkeys(self._notices)),
        )

    def loaded(self) -> None:
        """What was loaded against what was saved."""
        if self._without_optimizer:
            self._notices.append(
                f"{self._without_optimizer}: optimizer state and schedules are not restored, and "
                "not compared; neither are the following steps"
            )
        self._tensors()
        self._described_together()
        self._overwritten()
        self._numbers()
        self._random()
        if not self.differences:
            self._notice(
                "the checkpoint has other values than were saved, and they were loaded as saved",
                self._otherwise,
            )

    def _notice(self, text: str, names: Collection[str]) -> None:
        """Of some tensors, if there are any."""
        if names:
            self._notices.append(f"{text}: {some_of(names, _NAMED)}")

    def _tensors(self) -> None:
        saved, loaded = self._before.state(Point.SAVED), self._after.state(Point.LOADED)
        by_rank: list[str] = []
        copies: list[str] = []
        for item in saved:
            if self._without_optimizer and item[0] in _OF_OPTIMIZER:
                continue
            before = saved.tensor(item)
            if before is not None and not saved.conflicting(item, before):
                self._compared += 1
                self._tensor(item, before, loaded)
            elif self._layout:
                by_rank.append(" of ".join(item))
            else:
                self._compared += 1
                if self._by_rank(item, saved, loaded, Blame.EITHER) and item[0] is not What.BUFFER:
                    copies.append(" of ".join(item))
        self._notice("not compared, because ranks had values of their own", by_rank)
        self._notice("copies that differed before they were saved: run ttrace check", copies)
        for item in loaded:
            if item in saved or (self._without_optimizer and item[0] in _OF_OPTIMIZER):
                continue
            after = loaded.tensor(item)
            if item[0] is not What.MAIN and (
                item[0] not in _ZERO_AT_FIRST or after is None or after.any()
            ):
                self._differ(*item, How.EXTRA, Blame.LOADING)

    def _described_together(self) -> None:
        """Parameters of several classes that are wrong in one layer: the code around them all."""
        wrong = {d.name: None for d in self.differences if d.what is What.WEIGHT}
        weights = {name for kind, name in self._before.state(Point.SAVED) if kind is What.WEIGHT}
        for number, one in enumerate(self.differences):
            if one.where and one.where == describing(self._described, one.name):
                where = describing(self._described, one.name, wrong, weights - {*wrong})
                changed = self._changed(where, one.blame)
                self.differences[number] = dataclasses.replace(one, where=where, changed=changed)

    def _overwritten(self) -> None:
        """Weights that are right in the checkpoint are set from the optimizer's state in it."""
        wrong = {d.name: d for d in self.differences if d.what in _OF_OPTIMIZER}
        for number, weight in enumerate(self.differences):
            state = wrong.get(weight.name)
            is_right = weight.what is What.WEIGHT and weight.blame is Blame.LOADING
            if is_right and state is not None and state.blame is Blame.SAVING:
                self.differences[number] = dataclasses.replace(
                    weight, where=state.where, changed=state.changed
                )

    def _by_rank(self, item: tuple[What, str], old: State, new: State, blame: Blame) -> bool:
        """Whether state of which each rank has another value differs, in the same layout."""
        theirs = new.parts(item) if item in new else {}
        parts = old.parts(item)
        if wrong := [
            r for r, part in parts.items() if r not in theirs or not same(theirs[r], part)
        ]:
            self._differ(*item, How.DIFFERENT, blame, ranks=tuple(wrong))
        return bool(wrong)

    def _tensor(self, item: tuple[What, str], before: torch.Tensor, loaded: State) -> None:
        stored = self._of_checkpoint(item, before)
        blame = Blame.EITHER
        if stored is not None:
            self._stored += 1
            blame = Blame.LOADING if same(stored, before) else Blame.SAVING
        after = loaded.tensor(item) if item in loaded else None
        if after is None:
            how = How.INCOMPLETE if item in loaded else How.MISSING
            if how is How.INCOMPLETE or item[0] not in _ZERO_AT_FIRST or before.any():
                self._differ(*item, how, blame)
            return
        right = before.to(after.dtype)
        if after.shape != before.shape:
            rows = _common_rows(item[1], before, after)
            if rows is None:
                self._differ(*item, How.SHAPE, blame)
                return
            right = torch.cat([right[:rows], after[rows:]])
            before, after = before[:rows], after[:rows]
        wrong_ranks = loaded.conflicting(item, right)
        if not same(after, before):
            part = loaded.part(item, wrong_ranks[0]) if wrong_ranks else ""
            self._measured(item, before, after, blame, ranks=tuple(wrong_ranks), part=part)
        elif wrong_ranks:
            part = loaded.part(item, wrong_ranks[0])
            self._differ(*item, How.CONFLICT, blame, ranks=tuple(wrong_ranks), part=part)
        elif blame is Blame.SAVING:
            self._otherwise.append(" of ".join(item))

    def _of_checkpoint(self, item: tuple[What, str], before: torch.Tensor) -> torch.Tensor | None:
        stored = self._stored_tensor(*item)
        if stored is not None and item[0] is What.WEIGHT:
            # Megatron-FSDP stores main weights as the model's.
            stored = stored.to(before.dtype)
        if stored is not None and stored.shape != before.shape:
            rows = _common_rows(item[1], before, stored)
            return None if rows is None else torch.cat([stored[:rows], before[rows:]])
        return stored

    def _measured(
        self,
        item: tuple[What, str],
        before: torch.Tensor,
        after: torch.Tensor,
        blame: Blame,
        **more: object,
    ) -> None:
        kind, name = item
        self._differ(
            kind,
            name,
            How.DIFFERENT,
            blame,
            rel_err=distance(after, before),
            wrong=int(differing(after.double(), before.double()).sum()),
            total=before.numel(),
            **more,
        )

    def _differ(self, kind: What, name: str, how: How, blame: Blame, **more: object) -> None:
        where = self._where(kind, name, blame)
        more = {"where": where, "changed": self._changed(where, blame)} | more
        # Not all of these matter: a buffer may be scratch, and a generator unused.
        is_buffer = kind is What.BUFFER and name not in self._names_stored
        to = self._suspects if kind is What.RANDOM or is_buffer else self.differences
        to.append(Difference(what=kind, name=name, how=how, blame=blame, **more))  # type: ignore[arg-type]

    def _changed(self, where: str, blame: Blame) -> tuple[str, ...]:
        """The user's changes that ran then."""
        saving, loading = self._before.ranks, self._after.ranks
        runs = {Blame.SAVING: saving, Blame.LOADING: loading, Blame.EITHER: (*saving, *loading)}
        return nearest((place for rank in runs.get(blame, ()) for place in rank.changed), where)

    def _where(self, kind: What, name: str, blame: Blame) -> str:
        """The code that saves or loads it."""
        # Optimizers describe their state as the model describes the weights, if that is wrong too.
        of_weight = any(
            (d.what, d.name) == (What.WEIGHT, name) and d.blame is not Blame.LOADING
            for d in self.differences
        )
        if kind.is_tensor and (kind not in _OF_OPTIMIZER or of_weight):
            return describing(self._described, name)
        # What did not run when state was loaded should have been called.
        places = (self._after if blame is Blame.LOADING else self._before).ranks[0].places
        # A number's name begins with what it belongs to.
        belongs = What.MAIN if kind in _OF_OPTIMIZER else re.split(r"[.[]", name)[0]
        if blame is Blame.LOADING and name.endswith(("].lr", "].weight_decay")):
            # The scheduler sets these when it is loaded.
            belongs = SCHEDULER.rstrip(".")
        code = places.get(belongs) or places.get(kind)
        if code is None or (blame is Blame.TRAINING and kind is not What.SAMPLES):
            return ""
        return code.loads if blame is Blame.LOADING else code.saves

    def _numbers(self) -> None:
        old, new = self._before.numbers(Point.SAVED), self._after.numbers(Point.LOADED)
        if any(old[name] != new.get(name) for name in old if name.startswith(SCHEDULER)):
            # It sets these when it is loaded.
            old = {
                name: value
                for name, value in old.items()
                if name.rpartition("].")[2] not in SCHEDULED  # the field of a parameter group
            }
        counted = old.pop(_BOOKKEEPING, frozenset())
        if not self._layout and counted != new.get(_BOOKKEEPING):
            self._notices.append(f"not restored, and only logged: {_BOOKKEEPING}")
        self._compare_numbers(old, new, self._blame)

    def _blame(self, name: str, value: float) -> Blame:
        stored = self._stored_numbers.get(name)
        if not isinstance(stored, (int, float)):
            return Blame.EITHER
        is_same = float(stored) == value or (math.isnan(stored) and math.isnan(value))
        return Blame.LOADING if is_same else Blame.SAVING

    def _compare_numbers(
        self,
        old: Mapping[str, frozenset[float]],
        new: Mapping[str, frozenset[float]],
        blame: Callable[[str, float], Blame],
    ) -> None:
        for name in old:
            if self._without_optimizer and name.startswith(_NUMBERS_OF_OPTIMIZER):
                continue
            before, after = old[name], new.get(name, frozenset())
            if before != after:
                value = min(before - after, default=min(before))
                self._differ(
                    What.NUMBER,
                    name,
                    How.DIFFERENT if after else How.MISSING,
                    blame(name, value),
                    before=value,
                    after=min(after - before, default=None),
                )

    def _random(self) -> None:
        if self._layout:
            return
        if self._without_random:
            self._notices.append(
                f"{self._without_random}: random states are not restored, and not compared"
            )
            return
        for old, new in zip(self._before.ranks, self._after.ranks, strict=True):
            saved, loaded = old.random[Point.SAVED], new.random[Point.LOADED]
            read = new.random.get(Point.READ, {})
            for name in (name for name in saved if saved[name] != loaded.get(name)):
                if saved[name] == old.random[Point.END].get(name):
                    self._notices.append(
                        f"not restored, and not used by the compared steps: {What.RANDOM} {name}"
                    )
                else:
                    blame = Blame.LOADING if read.get(name) == saved[name] else Blame.SAVING
                    if not read:
                        blame = Blame.EITHER
                    self._differ(What.RANDOM, name, How.DIFFERENT, blame, ranks=(old.mesh.rank,))

    def following(self, moves: Moves | None) -> None:
        """The following steps, and the state after them."""
        if self._without_optimizer or (why := self._incomparable(moves)):
            if not self._without_optimizer:
                self._notices.append(f"the following steps are not compared: {why}")
            return
        exact = not self._layout and self._before.any("is_exact")
        for number in range(len(self._after.steps)):
            self._step(number, None if exact else moves)
        if not self.differences:
            self._ends(None if exact else moves)

    def settle(self) -> None:
        """State that may not matter is the cause only if all that differs can follow from it."""
        first = next(iter(self.differences), None)
        causes = (What.NUMBER, What.SAMPLES)  # of a step, if they differ before its loss
        if first and first.blame is Blame.TRAINING and first.what not in causes:
            self.differences[:0] = self._suspects
        else:
            effect = "perhaps without effect" if first else "without effect on the compared steps"
            names = dict.fromkeys(f"{suspect.what} {suspect.name}" for suspect in self._suspects)
            self._notice(f"not restored, {effect}", names)

    def _other_numbers(self) -> str:
        """Why the following steps of a correct restart have other losses, by far."""
        if self._layout and self._before.any("dropout"):
            return "dropout or random routing draws different numbers in a different layout"
        if self._layout and self._before.any("samples_by_layout"):
            return "another layout trains on other samples by design"
        return ""

    def _incomparable(self, moves: Moves | None) -> str:
        if why := self._other_numbers():
            return why
        saved, loaded = self._before.state(Point.SAVED), self._after.state(Point.LOADED)
        if any(saved.shape(item) != loaded.shape(item) for item in saved if item in loaded):
            return "the vocabulary is padded to another size"
        needs = self._layout or not self._before.any("is_exact")
        return "there is no perturbed restart for tolerances" if needs and moves is None else ""

    def _step(self, number: int, moves: Moves | None) -> None:
        at = self._at + number
        iteration = str(self._before.steps[at][0].iteration)
        if self._before.samples(at) != self._after.samples(number):
            steps = (*self._before.steps[at], *self._after.steps[number])
            ran = nearest((place for step in steps for place in step.changed), "")
            self._differ(What.SAMPLES, iteration, How.DIFFERENT, Blame.TRAINING, changed=ran)
            self._same_samples = False
        old = merged(rank.numbers for rank in self._before.steps[at])
        # Where a rank has no element of a parameter, torch's Adam does not count its steps.
        old = {name: value for name, value in old.items() if not name.endswith(_COUNT)}
        new = merged(rank.numbers for rank in self._after.steps[number])
        self._compare_numbers(old, new, lambda name, value: Blame.TRAINING)
        if not self._same_samples:
            # Losses and norms differ from here on because of these.
            return
        (losses, norm), (new_losses, new_norm) = self._before.logged(at), self._after.logged(number)
        for name in losses:
            pair = losses[name], new_losses.get(name)
            tolerance = moves.scalar(What.LOSS, name) if moves else 0.0
            self._scalar(What.LOSS, f"{name} of iteration {iteration}", pair, tolerance)
        tolerance = moves.scalar(What.GRAD_NORM, "") if moves else 0.0
        name = f"grad norm of iteration {iteration}"
        self._scalar(What.GRAD_NORM, name, (norm, new_norm), tolerance)

    def _scalar(
        self, kind: What, name: str, pair: tuple[float | None, float | None], tolerance: float
    ) -> None:
        before, after = pair
        if before == after or (before != before and after != after):  # both are not a number
            return
        error = math.inf if before is None or after is None else change(before, after)
        if tolerance > BLIND:
            self._notices.append(
                f"not compared, because rounding alone moves it by more than {BLIND:.0%}: {name}"
            )
        elif not error <= tolerance:
            more = {"rel_err": error, "tolerance": tolerance, "before": before, "after": after}
            self._differ(kind, name, How.DIFFERENT, Blame.TRAINING, **more)

    def _ends(self, moves: Moves | None) -> None:
        """The state after the last step."""
        old, new = self._before.state(Point.END), self._after.state(Point.END)
        blind, by_rank = [], []
        for item in old:
            before = old.tensor(item)
            if before is None or old.conflicting(item, before):
                if moves is None and not self._layout:
                    self._by_rank(item, old, new, Blame.TRAINING)
                else:
                    by_rank.append(" of ".join(item))
                continue
            after = new.tensor(item) if item in new else None
            if after is None:
                self._differ(*item, How.MISSING, Blame.TRAINING)
                continue
            # In another layout a buffer may be a rank's own.
            is_replicated = not self._layout or item[0] is not What.BUFFER
            if is_replicated and (wrong := new.conflicting(item, after)):
                self._differ(*item, How.CONFLICT, Blame.TRAINING, ranks=tuple(wrong))
                continue
            if same(after, before):
                continue
            tolerance = moves.tensor(item, before) if moves else 0.0
            if tolerance > BLIND:
                blind.append(" of ".join(item))
            elif not distance(after, before) <= tolerance:
                self._measured(item, before, after, Blame.TRAINING, tolerance=tolerance)
        after_last = "not compared after the last step, because"
        self._notice(f"{after_last} ranks had values of their own", by_rank)
        self._notice(f"{after_last} rounding alone moves it by more than {BLIND:.0%}", blind)


def _common_rows(name: str, a: torch.Tensor, b: torch.Tensor) -> int | None:
    """Rows that are not padding in either; ``None`` if the shapes differ in another way."""
    parameter = name.partition("/")[0]
    if not parameter.endswith(VOCABULARY) or a.dim() != b.dim() or a.shape[1:] != b.shape[1:]:
        return None
    return min(len(a), len(b))


def could_not(layout: str, error: TTraceError) -> Restart:
    """A restart that gave no answer, with the reason."""
    return Restart(layout=layout, verdict=Result.COULD_NOT_CHECK, reason=str(error))
