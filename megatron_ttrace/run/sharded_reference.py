# SPDX-License-Identifier: Apache-2.0
"""A reference on several ranks, for a model that does not fit on one device.

Each rank writes its shards. The last rank merges them into the trace that one device would have
written (``merging.py``), so candidates read it as any other. A perturbed replay of the ranks is
then compared with that trace as a candidate in their layout is.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_ttrace.compare import sharding
from megatron_ttrace.compare.measured import Measured
from megatron_ttrace.compare.moved import Moved, write_moves
from megatron_ttrace.compare.sharding import ShardSink
from megatron_ttrace.mcore import fronts
from megatron_ttrace.placement.token_index import NOBODY, TokenIndex
from megatron_ttrace.run import channel, merging
from megatron_ttrace.run.comparison import entry_of, layout_of
from megatron_ttrace.run.perturb import perturbed, spread_over
from megatron_ttrace.run.reference_run import ReferenceSession
from megatron_ttrace.run.rehearsal import Block, DataIterator
from megatron_ttrace.run.start import loaded
from megatron_ttrace.trace import codec, counted, owned
from megatron_ttrace.trace.errors import ExitCode
from megatron_ttrace.trace.meta import Unverified
from megatron_ttrace.trace.records import TraceKey
from megatron_ttrace.trace.store import TraceReader, TraceWriter


class ShardedReferenceSession(ReferenceSession):
    """Makes a reference trace on all ranks of this job."""

    def before_step(self, step: int, run: Callable[[], Any], iterator: DataIterator) -> int | None:
        """Do everything at the first step."""
        count = fronts.current().microbatches()
        last = self.ranks.size - 1
        self._layout = layout_of(self.model, self.args)
        self._by = sharding.known(self._order.divided)
        self._stages = self.ranks.exchange(
            "finding pipeline stages", lambda: self.model.mesh.at("pp")
        )
        self._group = self._of_this_stage() if self.args.num_experts else None
        self._measure_again()
        writer = TraceWriter(self._directory, 0)  # the last rank's alone writes
        moved: dict[TraceKey, Moved] = {}
        for block in self._blocks(iterator, count, run):
            moved |= self._block(block, writer)
        counts = self.ranks.exchange(
            "collecting what was counted", lambda: counted.encode(self._counted)
        )
        if (of_checkpoint := self._loaded) is not None:
            unverified = self.ranks.exchange(
                "collecting what was loaded", lambda: codec.encode(of_checkpoint.unverified)
            )
            of_checkpoint.unverified = loaded.of_ranks(
                [codec.decode(Unverified, message) for message in unverified]
            )

        def finish() -> None:
            write_moves(self._directory, moved)
            self._seal(count, merging.merged(map(counted.decode, counts)))

        self.ranks.from_one(last, "sealing the reference", finish)
        return ExitCode.EQUIVALENT

    def _trace(self, block: Block, to: TraceWriter) -> None:
        """Write this rank's shards, and on the last rank all of them merged."""
        shards = self._directory / f"shards-{block.first}"
        writer = TraceWriter(shards, self.ranks.rank)
        for initial in self._initial if block.first == self.settings.iterations[0] else ():
            writer.add(entry_of(initial, block.first), None)
        room = functools.partial(self._require_space, block.microbatches)

        def sink(iteration: int) -> ShardSink:
            return ShardSink(writer, iteration, self._layout, self._by, self._all_rows, room)

        if self._loaded is not None and block.first == self.settings.iterations[0]:
            self._loaded.write(sink(block.first))
        self._capture(block, sink)
        self.ranks.together("writing the shards", writer.close)

        def merge() -> None:
            merging.merge(shards, self._stages, to)
            to.close()
            owned.remove(shards)

        self.ranks.from_one(self.ranks.size - 1, "merging the shards", merge)

    def _of_this_stage(self) -> Any:
        """The group of the ranks that have the same layers. A collective."""
        stages = range(self.model.mesh.size("pp"))
        groups = [
            dist.new_group([rank for rank, stage in enumerate(self._stages) if stage == number])
            for number in stages
        ]
        return groups[self.model.mesh.at("pp")]

    def _all_rows(self, index: TokenIndex) -> TokenIndex:
        """What the ranks with the same layers dispatch, each row once. A collective of them."""
        columns = np.stack([index.microbatch, index.expert, index.position])
        rows = torch.from_numpy(columns[:, index.microbatch != NOBODY]).to(self.rehearsal.device)
        lengths = channel.gather(rows.new_tensor([rows.shape[1]]), self._group)
        padded = rows.new_full((3, int(max(lengths))), NOBODY)
        padded[:, : rows.shape[1]] = rows
        parts = channel.gather(padded, self._group)
        # Sorted by microbatch, expert and position.
        microbatch, expert, position = np.unique(torch.cat(parts, dim=1).cpu().numpy(), axis=1)
        real = microbatch != NOBODY
        return TokenIndex(microbatch[real], position[real], expert[real])

    def _replay_once(
        self,
        reader: TraceReader,
        block: Block,
        seed: int,
        before: Mapping[TraceKey, Moved],
    ) -> dict[TraceKey, Moved]:
        """Replay a block once on all ranks; each returns what the replays until now did."""
        measured: list[Measured] = []
        with perturbed(self.model.names, seed, self.model.optimizer, spread_over(self.model)):
            for iteration in block.iterations:
                sink = self._replay(reader, iteration, self._layout, seed)
                self.rehearsal.trace(block.run, sink, self._numbers(block.microbatches), iteration)
                measured += sink.measured
        movement = self.ranks.reduce(
            "collecting the replay", lambda: merging.movement(measured), merging.joined
        )
        return merging.moved(movement, before)
