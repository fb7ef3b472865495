# SPDX-License-Identifier: Apache-2.0
"""A large job and the axes of a small one: what the rules of shrinking share."""

import dataclasses
import functools

from megatron_ttrace.jobs.shrink import patterns
from megatron_ttrace.jobs.shrink.axes import Axes, borrowed, query_groups
from megatron_ttrace.jobs.shrink.command_flags import CommandFlags

ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
"""Options with the layers of the end stages of a pipeline."""

_OVERLAPPED = {"use_megatron_fsdp": 4, "overlap_moe_expert_parallel_comm": 3}
"""Options with which communication of a layer overlaps computation of its neighbours, and layers
that it takes to have one between others, or to use both of two buffers twice."""


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """What becomes of an option of Megatron's: the words after its flag (``None``: the flag goes).

    ``why`` is for the user; ``lost``: whether the small job runs other code without it.
    """

    option: str
    values: tuple[str, ...] | None
    why: str
    lost: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Depth:
    """Layers of a small job: of the whole model, and of its end stages by the option that says it.

    ``per_chunk`` are those of a model chunk, if all are alike; ``stages`` are the layout string's,
    if there is one.
    """

    layers: int
    ends: dict[str, int] = dataclasses.field(default_factory=dict)
    per_chunk: int = 2
    stages: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Case:
    """The arguments and axes of a large job, and the axes of a small one.

    ``own_data``: whether the small job trains on the large one's data and vocabulary; ``can_chat``:
    whether it can train on conversations.
    """

    flags: CommandFlags
    large: Axes
    small: Axes
    own_data: bool = False
    can_chat: bool = True

    @functools.cached_property
    def unit(self) -> int:
        """The granularity of matrix dimensions: what FP8 recipes quantise together."""
        if self.flags.text("fp8_recipe") == "blockwise":
            return 128
        if self.flags.text("fp8_recipe") == "mxfp8" or self.flags.has("fp4"):
            return 32
        return 16

    @property
    def hidden(self) -> int:
        """The small hidden size."""
        return 4 * self.unit

    @property
    def sequence(self) -> int:
        """The small sequence length: tokens of one rank fill a block of every FP8 recipe."""
        return max(64, self.unit) * max(1, self.small.tp * self.small.cp // 4)

    @functools.cached_property
    def heads(self) -> tuple[int, int]:
        """Attention heads and query groups: 2 heads per rank, and the relation of groups to ranks.

        Groups that are fewer than tensor-parallel ranks stay so: they are replicated then.
        """
        heads, groups = self.flags.integer("num_attention_heads", 8), query_groups(self.flags)
        # All-to-all context parallelism divides the heads of a rank once more.
        ranks = self.small.tp * (self.small.cp if "a2a" in self.flags.text("cp_comm_type") else 1)
        if not groups:
            return 2 * ranks if ranks > 1 else 4, 0
        few = groups < self.large.tp
        copied = min(groups, max(1, self.small.tp // 2))
        short = copied if few else ranks * min(2, max(1, groups // self.large.tp))
        count = short * min(2, max(1, heads // max(1, groups)))
        return max(count, 2 * ranks), short

    @functools.cached_property
    def frequencies(self) -> dict[str, list[int] | int]:
        """Options that say which layers are of which kind, as lists or periods."""
        names = ("moe_layer_freq", "linear_attention_freq", "no_rope_freq", "window_attn_skip_freq")
        by_option: dict[str, list[int] | int] = {}
        for name in names:
            text = self.flags.text(name)
            if (pattern := patterns.layers(text)) is not None:
                by_option[name] = pattern
            elif text.isdigit():
                by_option[name] = int(text)
        return by_option

    @functools.cached_property
    def depth(self) -> Depth:
        """The small number of layers, and how stages share them."""
        flags, large, small = self.flags, self.large, self.small
        if flags.has("pipeline_model_parallel_layout") and small.pp > 1:
            stages = patterns.shrink_stages(
                patterns.stages(flags.text("pipeline_model_parallel_layout")),
                small.pp * small.chunks,
            )
            if not any("t" in stage for stage in stages):
                stages[0] += "t"  # the large job's layers are all in stages between these
            while sum(stage.count("t") for stage in stages) < _least(self):
                stages = [stage.replace("t", "tt", 1) for stage in stages]
            return Depth(sum(stage.count("t") for stage in stages), stages=tuple(stages))
        before = max(1, flags.integer("num_layers", 2) // (large.pp * large.chunks))
        most = max([2, *(count for option, count in _OVERLAPPED.items() if flags.has(option))])
        per_chunk = min(most, before if small.chunks > 1 else max(2, before))
        if (together := flags.integer("recompute_num_layers")) > 1:
            # Layers that are recomputed together, and others: as many, or fewer if so before.
            more = 4 if before % together == 0 else 3
            per_chunk = max(per_chunk, more if together < before else 2)
        depth = _stages_alike(self, per_chunk)
        while depth.layers < _least(self):
            per_chunk += 1
            depth = _stages_alike(self, per_chunk)
        return depth


def _stages_alike(case: Case, per_chunk: int) -> Depth:
    """Stages of ``per_chunk`` layers a chunk, except for ends that have fewer or more."""
    flags, large, small = case.flags, case.large, case.small
    given = list(filter(flags.has, ENDS)) if small.pp > 1 else []
    ends = {end: small.chunks * max(1, per_chunk + _uneven(case, end)) for end in given}
    layers = (small.pp - len(ends)) * small.chunks * per_chunk
    layers += sum(ends.values())
    if small.pp > 1:
        layers -= borrowed(flags)
        places = flags.integer("num_layers") + borrowed(flags)
        if not ends and places % (large.pp * large.chunks):
            layers += 1  # Megatron refuses it, and says so
    return Depth(layers, ends, per_chunk)


def _least(case: Case) -> int:
    """Layers that it takes to have one of each kind."""
    # Two that are offloaded, and one that is not, which Megatron asks for.
    least = 3 if case.flags.integer("cpu_offloading_num_layers") > 1 else 2
    for value in case.frequencies.values():
        least = max(least, patterns.kinds(value) if isinstance(value, list) else min(2, value))
    if case.flags.has("first_last_layers_bf16"):
        least = max(least, sum(bf16_ends(case.flags).values()) + 1)
    return least


def bf16_ends(flags: CommandFlags) -> dict[str, int]:
    """Layers at either end that stay in BF16, in the small job."""
    return {
        name: min(1, flags.integer(name, 1))
        for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
    }


def _uneven(case: Case, end: str) -> int:
    """Whether an end stage of the large job has more layers than another stage (1), or fewer (-1).

    ``end`` is the option that says how many it has.
    """
    flags = case.flags
    ends = [flags.integer(option) for option in ENDS if flags.has(option)]
    stages = case.large.pp - len(ends)
    middle = (flags.integer("num_layers") - sum(ends)) / stages if stages else sum(ends) / 2
    return (flags.integer(end) > middle) - (flags.integer(end) < middle)
