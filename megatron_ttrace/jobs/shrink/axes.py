# SPDX-License-Identifier: Apache-2.0
"""Parallel axes: those of the large job, small ones, and subsets of them that fit a small world."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

from megatron_ttrace.jobs.shrink import patterns
from megatron_ttrace.jobs.shrink.command_flags import CommandFlags
from megatron_ttrace.trace.errors import TTraceError

OPTIONS = {
    "tp": "tensor_model_parallel_size",
    "cp": "context_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
"""Megatron's option of each axis that has one."""
FLAGS = {
    **{name: f"--{OPTIONS[name].replace('_', '-')}" for name in ("tp", "cp", "pp", "ep")},
    "dp": "the data-parallel size",
}
"""What a user calls the axes that ranks are divided along."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """Sizes of all axes: ``etp`` divides the tensors of experts, ``dp`` is data parallelism.

    ``chunks`` are the model chunks per pipeline stage (virtual pipeline). Of data-parallel ranks
    ``gtp`` gather each weight, and of those of experts ``egtp`` (generalized tensor parallelism).
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1
    chunks: int = 1
    gtp: int = 1
    egtp: int = 1

    @property
    def ranks(self) -> int:
        """Of the whole job."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def edp(self) -> int:
        """Copies of an expert's shard; 0 if the axes do not divide."""
        copies, remainder = divmod(self.tp * self.cp * self.dp, self.ep * self.etp)
        return 0 if remainder else copies

    @property
    def copies_experts_only(self) -> bool:
        """Whether only experts have copies: they are divided among fewer ranks than the rest."""
        return self.dp * self.cp == 1 < self.edp

    def spread(self) -> tuple[str, ...]:
        """The axes along which something is divided."""
        return tuple(name for name in FLAGS if getattr(self, name) > 1)


def of_large(flags: CommandFlags, ranks: int | None) -> Axes:
    """The axes of a job that starts ``ranks`` ranks.

    ``None`` stands for enough for every axis, and data parallelism; too few ranks for as many as
    the axes need. Raises ``TTraceError`` when they cannot be divided into the axes.
    """
    tp, cp, pp, ep = (_size(flags, OPTIONS[axis]) for axis in ("tp", "cp", "pp", "ep"))
    with_experts = flags.integer("num_experts") > 0
    ep = ep if with_experts else 1
    # Groups of experts are made even where there are none.
    etp = _size(flags, OPTIONS["etp"], tp if with_experts else 1)
    gtp = weight_shards(flags)
    least = math.lcm(tp * cp * gtp, ep * etp) * pp
    if ranks is None:
        ranks = math.lcm(tp * cp * 2 * gtp, ep * etp) * pp
    elif ranks < least:
        # Scripts say one machine where users are to say how many they have.
        ranks = math.lcm(ranks, least)
    if ranks % (tp * cp * pp):
        raise TTraceError(
            f"{ranks} ranks cannot be divided into tensor {tp} x context {cp} x pipeline {pp}"
        )
    _refuse(flags, tp, ep)
    return Axes(
        tp=tp,
        cp=cp,
        pp=pp,
        ep=ep,
        etp=etp,
        dp=ranks // (tp * cp * pp),
        chunks=_chunks(flags, pp),
        gtp=gtp,
        egtp=max(1, _size(flags, "expert_tensor_parallel_num_weight_shards", etp) // etp),
    )


def _refuse(flags: CommandFlags, tp: int, ep: int) -> None:
    """What Megatron refuses in a large job, and would accept in a small one."""
    for option, axis, size in (
        ("num_attention_heads", "tp", tp),
        ("num_query_groups", "tp", tp),
        ("num_experts", "ep", ep),
    ):
        groups = option == "num_query_groups"
        value = query_groups(flags) if groups else flags.integer(option)
        shared = groups and value and not size % value
        if value % size and not shared:
            name = option.replace("_", "-")
            raise TTraceError(f"--{name} {value} cannot be divided by {FLAGS[axis]} {size}")


def query_groups(flags: CommandFlags) -> int:
    """Groups of query heads; 0 without the flag: then Megatron has one for each head."""
    return flags.integer("num_query_groups", 1) if flags.has("group_query_attention") else 0


def weight_shards(flags: CommandFlags) -> int:
    """How many ranks gather what tensor parallelism leaves of a weight."""
    tp = _size(flags, OPTIONS["tp"])
    return max(1, _size(flags, "tensor_parallel_num_weight_shards", tp) // tp)


def _size(flags: CommandFlags, option: str, default: int = 1) -> int:
    return max(1, flags.integer(option, default))


def _chunks(flags: CommandFlags, pp: int) -> int:
    """Model chunks per stage, as ``validate_args`` derives them."""
    if flags.has("num_virtual_stages_per_pipeline_rank"):
        return _size(flags, "num_virtual_stages_per_pipeline_rank")
    if flags.has("pipeline_model_parallel_layout"):
        return _chunks_of(flags.text("pipeline_model_parallel_layout"), flags, pp)
    pattern = flags.text("hybrid_layer_pattern").split("/")[0]
    if "|" in pattern:
        return _divided(f"--hybrid-layer-pattern {pattern}", len(pattern.split("|")), pp)
    if flags.has("num_layers_per_virtual_pipeline_stage"):
        layers = flags.integer("num_layers") + borrowed(flags)
        return max(1, layers // pp // _size(flags, "num_layers_per_virtual_pipeline_stage"))
    return 1


def _divided(what: str, stages: int, pp: int) -> int:
    """Stages on each rank; what Megatron refuses would be lost in a small job."""
    if stages % pp:
        raise TTraceError(f"{what}: {stages} stages cannot be divided by {pp} pipeline ranks")
    return stages // pp


def _chunks_of(layout: str, flags: CommandFlags, pp: int) -> int:
    what = f"--pipeline-model-parallel-layout {layout}"
    stages = patterns.stages(layout)
    layers, given = sum(stage.count("t") for stage in stages), flags.integer("num_layers")
    if given and layers != given:
        raise TTraceError(f"{what}: {layers} decoder layers, but --num-layers {given}")
    return _divided(what, len(stages), pp)


def borrowed(flags: CommandFlags) -> int:
    """Places of layers that the embedding and the loss take in a pipeline."""
    return sum(flags.has(f"account_for_{end}_in_pipeline_split") for end in ("embedding", "loss"))


def of_small(
    flags: CommandFlags,
    large: Axes,
    kept: tuple[str, ...] | None = None,
    *,
    stages: int = 3,
    ring: int = 2,
) -> Axes:
    """Every axis above 1 becomes 2, and a pipeline with a stage in the middle has 3, or more.

    Except where 2 would not run the same code: context parallelism on two levels needs 2 x 2, as do
    several query groups with copies on tensor-parallel ranks; interleaving without overlapped
    communication 3 stages (``validate_args``), as does multi-token prediction between embedding and
    loss, which Megatron does not support on the embedding's rank (finding 53), and several
    instances of the distributed optimizer, or copies of weights in shards, 2 ranks each. If ranks
    of an instance have copies of an expert, some still do.

    Axes that are not ``kept`` become 1. The pipeline has at most ``stages``: only with a third does
    one both receive and send in each direction, only with a fourth does one that receives have more
    than two microbatches in flight, unless stages are interleaved. Context parallelism has at most
    ``ring``, and a stage at most 3 chunks: of two, the next one is the previous one; 4, or else
    2, where there would be as many as stages, and are not.
    """

    def size(name: str, most: int = 2) -> int:
        if kept is not None and name not in kept:
            return 1
        return min(most, int(getattr(large, name)))

    copied = 1 < query_groups(flags) < large.tp
    tp, pp, ep = size("tp", 4 if copied else 2), size("pp", stages), size("ep")
    cp = size("cp", ring if large.cp % ring == 0 else 2)
    levels = flags.text("hierarchical_context_parallel_sizes").split()
    if cp > 1 and levels:
        cp = math.prod(min(2, int(level)) for level in levels if level.isdigit())
    chunks = min(3, large.chunks) if pp > 1 else 1
    if chunks > 1 and flags.has("overlap_p2p_comm"):  # its only flag switches it off
        pp = 3
    if large.pp == large.chunks:
        pp = min(pp, 3)
    elif stages > 2 and pp == chunks > 1:
        chunks += 1 if large.chunks > chunks else -1
    predicting = patterns.stages(flags.text("pipeline_model_parallel_layout"))[:-1]
    if pp == 2 < large.pp and "m" in "".join(predicting):
        pp = 3
    etp = tp if large.etp == large.tp else min(2, large.etp)
    if kept is not None and "ep" not in kept and "tp" not in kept:
        etp = 1
    if flags.has("use_tp_pp_dp_mapping") and pp > 1:
        tp, cp, ep, etp = _equal_copies(flags, Axes(tp=tp, cp=cp, ep=ep, etp=etp), large)
    dp = size("dp")
    instances = flags.integer("num_distributed_optimizer_instances", 1) if dp > 1 else 1
    if instances > 1:
        dp = 4
    gtp, egtp = _few_shards(large) if dp > 1 else (1, 1)
    if gtp > 1:
        dp = 2 * gtp if large.dp > large.gtp else gtp
    for _ in range(3):
        axes = Axes(tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, dp=dp, chunks=chunks, gtp=gtp, egtp=egtp)
        enough = 1 if large.edp == 1 or "dp" not in (kept or ("dp",)) else 2
        if enough > 1 and 1 < instances < large.edp:
            enough = 4
        if axes.edp >= enough and axes.edp % egtp == 0:
            break
        dp *= 2
    return axes


def _few_shards(large: Axes) -> tuple[int, int]:
    """How many ranks gather a weight, and one of an expert: unequal numbers stay so."""
    gtp, egtp = min(2, large.gtp), min(2, large.egtp)
    if gtp == egtp == 2 and large.gtp != large.egtp:
        return (4, 2) if large.gtp > large.egtp else (2, 4)
    return gtp, egtp


def _equal_copies(flags: CommandFlags, small: Axes, large: Axes) -> tuple[int, int, int, int]:
    """The smallest tp, cp, ep and etp with as many copies of experts as of everything else.

    They are between those of ``small`` and ``large``. ``initialize_model_parallel``
    (megatron/core/parallel_state.py) needs that where pipelines are not the last in the order of
    ranks.
    """
    spans = [
        [size for size in range(least, most + 1) if size == least or most % size == 0]
        for least, most in ((getattr(small, n), getattr(large, n)) for n in ("tp", "cp", "ep"))
    ]
    if flags.has("hierarchical_context_parallel_sizes"):
        spans[1] = [small.cp]
    follows = not flags.has("expert_tensor_parallel_size")
    candidates = []
    for tp, cp, ep in itertools.product(*spans):
        etp = tp if follows else tp * cp // ep
        if tp * cp == ep * etp and (follows or small.etp <= etp <= large.etp):
            # Without experts there is no axis, though Megatron makes their groups.
            candidates.append((tp, cp, ep, small.etp if follows and large.etp == 1 else etp))
    return min(candidates, key=math.prod, default=(small.tp, small.cp, small.ep, small.etp))


LONGER = {
    "pp": "middle stages of the pipeline",
    "cp": "four context-parallel ranks",
}
"""Axes of which two ranks do not show everything, and what only more of them have."""


def longer(axes: Axes, axis: str) -> bool:
    """Whether an axis has more than two ranks."""
    return int(getattr(axes, axis)) > 2


def jobs(flags: CommandFlags, large: Axes, most: int) -> list[Axes]:
    """The axes of the small jobs: one if the world is large enough, else all pairs are covered.

    Where a middle stage of the pipeline, or a ring of four context-parallel ranks, does not fit
    beside the other axes, one job has it alone.
    Axes of different sizes, but for pipelines, have different ones in one of the jobs, so that code
    that takes one for the other shows. Raises ``TTraceError``, with its name, when a pair of axes
    does not fit.
    """

    def longest(kept: tuple[str, ...] | None = None) -> list[Axes]:
        sizes = itertools.product((4, 2), (4, 3))
        smalls = (of_small(flags, large, kept, stages=pp, ring=cp) for cp, pp in sizes)
        return [small for small in smalls if small.ranks <= most][:1]

    chosen = longest() or _of_two_stages(flags, large, most)
    for axis in LONGER:
        if longer(large, axis) and not any(longer(job, axis) for job in chosen):
            chosen += [job for job in longest((axis,)) if longer(job, axis)]
    return chosen + _apart(flags, large, chosen, most)


def _apart(flags: CommandFlags, large: Axes, chosen: Sequence[Axes], most: int) -> list[Axes]:
    """More jobs, for axes that have different sizes, but the same one in each job until now.

    Pipelines are left out: nothing is divided by the number of their stages.
    """
    spread = [axis for axis in large.spread() if axis != "pp"]
    of_experts = ["etp", "edp"] if large.ep > 1 else []
    alike: list[tuple[str, ...]] = [
        pair
        for pair in itertools.combinations([*spread, *of_experts], 2)
        if _differ(large, *pair) and not any(_differ(job, *pair) for job in chosen)
    ]
    fitting = _fitting(flags, large, spread, most)
    differing = [(job, {pair for pair in alike if _differ(job, *pair)}) for job in fitting.values()]
    return _cover(flags, differing)


def _differ(axes: Axes, one: str, other: str) -> bool:
    return bool(getattr(axes, one) != getattr(axes, other))


def _of_two_stages(flags: CommandFlags, large: Axes, most: int) -> list[Axes]:
    complete = of_small(flags, large, stages=2)
    if complete.ranks <= most:
        return [complete]
    spread = large.spread()
    fitting = _fitting(flags, large, spread, most)
    pairs: list[tuple[str, ...]] = [*itertools.combinations(spread, 2)] or [spread]
    for pair in sorted(pairs):
        if not any({*pair} <= {*kept} for kept in fitting):
            needed = of_small(flags, large, pair, stages=2).ranks
            names = " with ".join(FLAGS[axis] for axis in pair)
            raise TTraceError(
                f"{names} does not fit {most} ranks: the smallest job has {needed}; "
                f"give --max-ranks {needed}"
            )
    return _cover(
        flags,
        [
            (fitting[kept], {pair for pair in pairs if {*pair} <= {*kept}})
            for kept in sorted(fitting, reverse=True)
        ],
    )


def _fitting(
    flags: CommandFlags, large: Axes, names: Sequence[str], most: int
) -> dict[tuple[str, ...], Axes]:
    """Jobs that have some of these axes, and fit; pipelines have two stages."""
    subsets = itertools.chain(*(itertools.combinations(names, n) for n in range(1, len(names))))
    jobs = {kept: of_small(flags, large, kept, stages=2) for kept in subsets}
    return {kept: job for kept, job in jobs.items() if job.edp and job.ranks <= most}


def _cover(
    flags: CommandFlags, candidates: Sequence[tuple[Axes, set[tuple[str, ...]]]]
) -> list[Axes]:
    """Few jobs that together have all pairs that some have; among equals the smaller world.

    If possible without jobs whose only copies are those of experts, for which code may be missing
    that nobody needs (finding 91).
    """
    with_experts = flags.integer("num_experts") > 0

    def rank(candidate: tuple[Axes, set[tuple[str, ...]]]) -> tuple[bool, int, int]:
        job, pairs = candidate
        return with_experts and job.copies_experts_only, -len(pairs), job.ranks

    chosen: list[Axes] = []
    while candidates := [(job, pairs) for job, pairs in candidates if pairs]:
        job, covered = min(candidates, key=rank)
        chosen.append(job)
        candidates = [(other, pairs - covered) for other, pairs in candidates]
    return chosen
