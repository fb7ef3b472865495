# SPDX-License-Identifier: Apache-2.0
"""A rehearsal: traced steps of Megatron's own, after which all state is as it was before.

A candidate and a reference both have one (``candidate.py``, ``reference_run.py``).
"""

import copy
import dataclasses
import functools
import math
import os
import traceback
from collections.abc import Callable, Container, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from megatron_ttrace import cpu
from megatron_ttrace.capture.batches import Served
from megatron_ttrace.capture.step import StepSink, StepTap, TracedModel
from megatron_ttrace.jobs.settings import Settings
from megatron_ttrace.mcore import balancing, fronts, gathering, losses, quiet
from megatron_ttrace.mcore.arguments import MegatronArguments, Optimizer, Scheduler
from megatron_ttrace.mcore.buffers import Buffers
from megatron_ttrace.mcore.groups import current_mesh, device_of
from megatron_ttrace.mcore.names import canonical_names, unwrap
from megatron_ttrace.mcore.optimizer import Snapshot, every_optimizer, owned_by, reload_offloaded
from megatron_ttrace.mcore.plain import PlainState
from megatron_ttrace.mcore.roles import is_of_adapter
from megatron_ttrace.mcore.sharded_weights import WeightPart, are_published, parts_of, publish
from megatron_ttrace.run import low_precision
from megatron_ttrace.run.agreement import EndError, Ranks
from megatron_ttrace.run.start import handoff
from megatron_ttrace.run.start.moments import awaken, prime
from megatron_ttrace.run.start.parameters import agreed, constants_of, fill
from megatron_ttrace.trace.budget import Budget, give_back, host_room
from megatron_ttrace.trace.captured import Batch
from megatron_ttrace.trace.copies import Copies
from megatron_ttrace.trace.counted import Counted
from megatron_ttrace.trace.errors import DEBUG, TTraceError, one_line
from megatron_ttrace.trace.records import STEP_LEVEL, Kind, MetricIndex
from megatron_ttrace.trace.start import StartValues

type DataIterator = Iterator[Any] | list[Iterator[Any]] | None
"""What Megatron gives to ``train_step``; a list has one iterator per virtual-pipeline chunk."""

_INPUTS = ("tokens", "input_ids")
_IDS = (*_INPUTS, "labels")
_RANKS_OF_A_HOST = 8
"""At most, if the launcher does not say."""

OWN_DROPOUT = "the model's own dropout is switched off in the traced steps"
_LEFT_OUT = "passes of the model without gradients are not compared"
_EVALUATING = "after the traced step, the model is in evaluation mode (model.eval()) on some ranks"
_RANDOM = (
    "the model draws random numbers in the traced steps: other layouts draw different ones, so "
    "what depends on them differs by design; check the job without them"
)


@dataclasses.dataclass(frozen=True)
class Block:
    """Consecutive traced iterations, each of so many microbatches: one rehearsal.

    ``served`` are the batches of all of them, ``run`` is Megatron's training step.
    """

    iterations: Sequence[int]
    microbatches: int
    served: Served
    run: Callable[[], Any]

    @property
    def first(self) -> int:
        """The first iteration."""
        return self.iterations[0]

    @property
    def text(self) -> str:
        """How many steps there are, in words."""
        return "the step" if len(self.iterations) == 1 else f"{len(self.iterations)} steps"

    def batches(self, iteration: int) -> list[Batch]:
        """The batches of an iteration; none on a rank that reads no data."""
        at = self.iterations.index(iteration) * self.microbatches
        return self.served.batches[at : at + self.microbatches]


def traced_model(
    chunks: list[torch.nn.Module], optimizer: Optimizer, args: MegatronArguments
) -> TracedModel:
    """What Megatron's ``setup_model_and_optimizer`` returned on this rank, with its names."""
    mesh = current_mesh(args)
    offset = (args.num_experts or 0) // mesh.size("ep") * mesh.at("ep")
    return TracedModel(
        chunks,
        [canonical_names(unwrap(chunk), expert_offset=offset) for chunk in chunks],
        optimizer,
        mesh,
    )


def settle(model: TracedModel, args: MegatronArguments) -> None:
    """Gather updated parameters now if Megatron would do so in the next forward pass.

    That still does so, too. What it would not gather stays as it is, so that it shows.
    """
    if are_published(model.chunks):
        for chunk in model.chunks:
            chunk.synchronize_param_gather()  # type: ignore[operator]
        return
    if not getattr(args, "overlap_param_gather", False):
        return
    with gathering.still_due(model.chunks), gathering.nothing_else(model.chunks):
        fronts.current().synchronise(model.chunks, model.optimizer)


def spread_ids(item: Any, vocabulary: int) -> Any:
    """A loader's batch with its ids permuted within the (padded) vocabulary; others are unchanged.

    A tensor-parallel rank holds a range of the vocabulary. Bytes of English text, or the first
    batch of any data set, leave most ranges unused, and a fault in an unused range is invisible. So
    ids are permuted, in both runs alike. Sequences keep their structure; masks and document borders
    were computed from the original ids.
    """
    if not isinstance(item, MutableMapping):
        return item
    # Near the golden section of the vocabulary, so that neighbours are moved far apart.
    factor = max(1, int(vocabulary * 0.618))
    while math.gcd(factor, vocabulary) != 1:
        factor += 1

    def permuted(ids: torch.Tensor) -> torch.Tensor:
        wide = ids.long()  # which has room for the product
        renamed = (wide * factor + 1) % vocabulary
        # An ignored label is negative.
        return torch.where((wide >= 0) & (wide < vocabulary), renamed, wide).to(ids.dtype)

    tokens = [value for name in _INPUTS if torch.is_tensor(value := item.get(name))]
    dims = max((value.dim() for value in tokens), default=0)

    def are_ids(value: Any) -> bool:
        if not torch.is_tensor(value) or value.dtype == torch.bool or value.is_floating_point():
            return False
        # A label of a whole sample is a class.
        return value.dim() >= dims and torch.iinfo(value.dtype).max >= vocabulary - 1

    spread = copy.copy(item)
    for name, value in item.items():
        if name in _IDS and are_ids(value):
            spread[name] = permuted(value)
    return spread


class Rehearsal:
    """Traced steps of this rank: equal starts, Megatron's step, all state as before.

    ``chunks``, ``optimizer`` and ``scheduler`` are what Megatron's ``setup_model_and_optimizer``
    returned, ``budget`` is for tensors that are kept.
    """

    def __init__(
        self,
        chunks: list[torch.nn.Module],
        optimizer: Optimizer,
        scheduler: Scheduler,
        *,
        args: MegatronArguments,
        settings: Settings,
        ranks: Ranks,
        budget: Budget,
    ) -> None:
        self.model = traced_model(chunks, optimizer, args)
        self.device = ranks.device = device_of(chunks)
        self.start: tuple[Path, float | None] | None = None
        """Where the state of a start that was loaded is, and the optimizer's step in it."""
        self.remarks: dict[str, None] = {}
        """What traced steps of this rank showed about the script, for the report."""
        self._args = args
        self._settings = settings
        self._ranks = ranks
        self._budget = budget
        self._scheduler = scheduler
        balancing.keep_biases(chunks)
        self._buffers = Buffers(chunks)
        self._plain = self.plain()
        self._constants = self._agreed_constants()
        self._built_with = quiet.random_states()
        self._errors: list[str] = []
        self._copies = Copies()
        self._kept = ExitStack()

    def _agreed_constants(self) -> dict[str, float]:
        """What vectors begin with, where it is one number on all ranks that have a part."""
        parts = parts_of(self.model.chunks)
        found = self._ranks.exchange(
            "looking at the initial values",
            lambda: constants_of(
                (parts[p].stepped if p in parts else p, place) for p, place in self.model.places()
            ),
        )
        return agreed(found)

    def afterwards(self, work: Callable[..., Any], *args: Any) -> None:
        """Within :meth:`steps`: call ``work`` before the state is restored."""
        self._kept.callback(work, *args)

    def plain(self, copies: Copies | None = None) -> PlainState:
        """What is in plain attributes and global variables now; with room, beside the model too."""
        optimizers = every_optimizer(self.model.optimizer)
        others = self._scheduler, *optimizers
        return PlainState(self.model.chunks, others, copies, self._args)

    def saved(self) -> Callable[[], None]:
        """Save the training state within :meth:`steps`; returns what puts it back."""
        start, plain = Snapshot(self.model.chunks, self.model.optimizer), self.plain()

        def again() -> None:
            start.restore()
            # Otherwise a replay's second step would have the learning rate of a later one.
            plain.restore()
            low_precision.restart_scales(self._args, self.model.chunks, self.model.mesh)

        return again

    def equal_start(
        self,
        stored: StartValues | None = None,
        keep: Callable[[str, torch.Tensor], None] | None = None,
    ) -> None:
        """Overwrite all parameters, the optimizer's copies of them, and its moments.

        Buffers, random states, and the schedules of learning rate and weight decay, are those with
        which the run began: the reference makes no steps before a traced one, and on a CPU reading
        data may draw from the state of dropout, on the ranks that read.

        Args:
            stored: has the values already. A GPU generates them faster than it reads them.
            keep: called with each moment.
        """
        self._buffers.restore()
        self._built_with()
        self._scheduler.step(increment=0)
        if self.start is not None:
            handoff.restore(self.model, *self.start)
            if self.start[1] is None and self._settings.init == "reveal":
                self._fill_adapters()
            return
        stored = stored if self.device.type == "cpu" else None
        parts = parts_of(self.model.chunks)
        self._ranks.together("setting the start values", lambda: self._fill(parts, stored))
        if are_published(self.model.chunks):
            publish(self.model.chunks)
        else:
            self.model.optimizer.reload_model_params()
            reload_offloaded(self.model.optimizer)
        if self._settings.init == "reveal":
            owned = owned_by(self.model.optimizer)
            awaken(owned.values(), self._args.lr)
            prime(
                [(place, owned[p]) for p, place in self.model.places() if p in owned],
                self.model.mesh,
                seed=self._args.seed,
                coarse=getattr(self._args, "use_precision_aware_optimizer", False),
                stored=stored,
                keep=keep,
            )
            # Start values are equal, so that nothing is hidden.
            self._kept.enter_context(gathering.in_forward_passes(self.model.chunks))

    def _fill_adapters(self) -> None:
        """Give the matrices of new adapters of a frozen model start values.

        Their own are zero in one of two layers, and then so is the gradient of the other. Vectors
        keep theirs: DoRA's magnitudes are norms of the frozen weights.
        """
        trained = {place.name: place for p, place in self.model.places() if p.requires_grad}
        new = {name for name, place in trained.items() if len(place.logical_shape) > 1}
        task = "setting the start values"

        def trains_adapters_only() -> bool:
            return all(map(is_of_adapter, trained)) and not are_published(self.model.chunks)

        # A pipeline stage may have nothing that is trained.
        if all(self._ranks.exchange(task, trains_adapters_only)):
            self._ranks.together(task, lambda: self._fill({}, None, new))
            self.model.optimizer.reload_model_params()

    def _fill(
        self,
        parts: Mapping[torch.nn.Parameter, WeightPart],
        stored: StartValues | None,
        names: Container[str] | None = None,
    ) -> None:
        """Fill parameters with these names, or all and the biases of routers."""
        from megatron.core.utils import get_model_config

        put = functools.partial(
            fill,
            mesh=self.model.mesh,
            seed=self._args.seed,
            config=get_model_config(self.model.chunks[0]),
            # Beside loaded weights, values that reveal more would drown them.
            init=self._settings.init if names is None else "megatron",
            constants=self._constants,
            stored=stored,
        )
        for parameter, place in self.model.places():
            if names is not None and place.name not in names:
                continue
            part = parts.get(parameter)
            # Rounded to the model's precision first, like main weights that are copies.
            target = part.stepped.to(part.weights.dtype) if part else parameter
            put(place.flat(*part.range) if part else place, target)
            if part:
                part.stepped.copy_(target)
        for place, buffer in self.model.buffers() if names is None else ():
            if balancing.is_bias(place.name):
                put(place, buffer)

    def serve(self, served: Served, *, later: bool = False) -> None:
        """Serve fetched batches to a rehearsal, with ids that use the whole vocabulary.

        Or, ``later``, those that follow them.
        """
        vocabulary = getattr(self._args, "padded_vocab_size", None)
        if self._settings.init == "reveal" and vocabulary:
            change = functools.partial(spread_ids, vocabulary=vocabulary)
            served.serve(change, in_rehearsal=True, later=later)
        else:
            served.serve(in_rehearsal=True, later=later)

    def trace(
        self,
        run: Callable[[], Any],
        sink: StepSink,
        microbatches: Sequence[int],
        iteration: int,
        batches: Sequence[Batch] = (),
    ) -> Counted:
        """Run one traced training step, on all ranks; it is captured into the sink.

        ``microbatches`` are the reference's numbers of this rank's ``batches``, of which tokens are
        captured; a rank without data has none.

        Returns:
            Which elements went into the step's norms, counts and updates on this rank.

        Raises:
            GivenUpError: on every rank, when tracing failed on any.
            EndError: when Megatron's own step failed.
        """
        for number, batch in zip(microbatches, batches, strict=False):
            for name, value in batch.items():
                sink.placed((number, Kind.TOKENS, name, 0), value, value.shape, ())
        tap = StepTap(
            self.model,
            sink,
            microbatches,
            self._tracing_failed,
            self._settle,
            lambda: self._ranks.together("attaching to the model", self._refuse),
            self._copies,
        )
        self._kept.callback(tap.detach)
        began, states = self._scheduler.num_steps, quiet.drawn_from()
        tap.run(lambda: self.step(functools.partial(self._begin, tap, run)))
        # Kernels on a GPU may move the states although they draw nothing.
        if cpu.active() and not tap.draws and quiet.drawn_from() != states:
            self.remarks[_RANDOM] = None
        samples = torch.tensor(float(self._scheduler.num_steps - began))
        sink.placed(
            (STEP_LEVEL, Kind.METRIC, "scheduled-samples", MetricIndex.VALUE), samples, (), ()
        )
        self._ranks.together("tracing", self._refuse)
        if tap.left_out:
            self.remarks[_LEFT_OUT] = None
        if not all(chunk.training for chunk in self.model.chunks):
            self.remarks[_EVALUATING] = None
        return tap.counted(iteration)

    def _begin(self, tap: StepTap, run: Callable[[], Any]) -> Any:
        if self.start is None and self._settings.init == "reveal":
            # Forward passes gather, and parameters are equal on all ranks that have them.
            tap.watch_uses(gathering.spoil(self.model.chunks))
        return run()

    def step(self, run: Callable[[], Any]) -> Any:
        """Megatron's own training step.

        Raises:
            EndError: when it fails. The other ranks may wait in a collective that this one left,
                so training cannot go on.
        """
        try:
            return run()
        except EndError:
            raise
        except Exception as error:
            traceback.print_exception(error)
            wrong = TTraceError(f"Megatron's training step failed ({one_line(error)})")
            raise self._ranks.end(wrong, "in a traced step") from error

    @contextmanager
    def steps(self, *, restore: bool) -> Iterator[None]:
        """Within this context training steps do not count; afterwards all state is restored.

        Raises:
            EndError: when restoring failed on any rank: no rank trains on.
        """
        with ExitStack() as watched, ExitStack() as kept:
            try:
                watched.enter_context(self._ranks.watching())
                self._kept = kept
                self._keep(kept, restore=restore)
                yield
            except EndError:
                kept.pop_all()
                raise
            except BaseException as error:
                self._ranks.give_up(error, "in the traced steps")
                # An interrupted process does not wait for the others.
                self._put_back(kept, waits=restore and isinstance(error, Exception))
                raise
            else:
                self._put_back(kept, waits=restore)

    def _room(self) -> Copies:
        """Room for copies: the budget's, of a GPU's tensors also the host's memory, then a file."""
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", min(self._ranks.size, _RANKS_OF_A_HOST)))
        host = 0 if self.device.type == "cpu" else host_room(ranks)
        return Copies(self._budget.kept, host, self._settings.directory, self._ranks.size)

    def _keep(self, kept: ExitStack, *, restore: bool) -> None:
        if restore:
            kept.callback(give_back)
        self._copies = kept.enter_context(self._room())
        kept.callback(self.plain(self._copies if restore else None).restore)
        self._plain.restore()  # and the schedule
        kept.enter_context(quiet.one_attempt())
        off = quiet.Off() if cpu.active() else 0.0
        drops = functools.partial(self.remarks.update, {OWN_DROPOUT: None})
        kept.enter_context(quiet.without_dropout(self.model.chunks, off, drops))
        kept.enter_context(quiet.without_options(self.model.chunks))
        kept.enter_context(quiet.without_dumps(self._args))
        if self._settings.init == "reveal":
            kept.enter_context(losses.revealed(self._args, self.model.chunks))
            if self.start is None:
                kept.enter_context(quiet.clipped(self.model.chunks))
        kept.enter_context(quiet.random_states_kept())
        kept.enter_context(quiet.metrics_kept())
        kept.enter_context(
            low_precision.equal_scales(self._args, self.model.chunks, self.model.mesh)
        )
        snapshot = None
        if restore:
            # The last update may not be gathered yet: the next forward pass would do it, but a
            # rehearsal's comes first, and what is restored would lack it.
            self._ranks.meet("saving the training state")
            self._settle()
            snapshot = Snapshot(self.model.chunks, self.model.optimizer, self._copies)
        # Restoring may communicate: either all ranks do it or none.
        self._ranks.meet("saving the training state")
        if snapshot is not None:
            kept.callback(snapshot.restore)
        # A gather that the optimizer's step began would overwrite what is restored.
        kept.callback(self._settle)

    def _put_back(self, kept: ExitStack, *, waits: bool) -> None:
        try:
            kept.close()
        except BaseException as error:
            traceback.print_exception(error)
            wrong = TTraceError(f"the training state could not be restored ({one_line(error)})")
            raise self._ranks.end(wrong, "after the traced steps") from error
        if waits:
            self._ranks.all_back()

    def _tracing_failed(self, error: BaseException) -> None:
        if self._settings.role == "reference" and self._ranks.size > 1:
            # Other ranks would wait for this one to exchange rows.
            raise self._ranks.end(error, "tracing")
        self._errors.append(str(error) if isinstance(error, TTraceError) else one_line(error))
        if os.environ.get(DEBUG):
            traceback.print_exception(error)

    def _refuse(self) -> None:
        if self._errors:
            raise TTraceError(f"tracing failed: {self._errors[0]}")

    def _settle(self) -> None:
        settle(self.model, self._args)
