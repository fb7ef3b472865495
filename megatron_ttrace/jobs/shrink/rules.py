# SPDX-License-Identifier: Apache-2.0
"""What becomes of each size, one rule per concern.

A rule sees the large job and the axes of a small one, and yields the options that it changes. No
rule knows of another's result: what two share is a function of the :class:`Case`.
"""

import itertools
import math
from collections.abc import Callable, Iterator

from megatron_ttrace.jobs.shrink import documents, patterns
from megatron_ttrace.jobs.shrink.axes import OPTIONS
from megatron_ttrace.jobs.shrink.case import ENDS, Case, Change, bf16_ends
from megatron_ttrace.jobs.shrink.command_flags import CommandFlags
from megatron_ttrace.trace.errors import TTraceError


def _sizes(why: str, **sizes: int) -> Iterator[Change]:
    """Options that become these numbers."""
    return (Change(option, (str(size),), why) for option, size in sizes.items())


def _if_set(case: Case, why: str, **sizes: int) -> Iterator[Change]:
    """The same, of those that the large job has."""
    return (change for change in _sizes(why, **sizes) if case.flags.has(change.option))


def _gone(case: Case, why: str, *options: str) -> Iterator[Change]:
    """Flags that go, of those that the large job has."""
    return (Change(option, None, why) for option in options if case.flags.has(option))


_SHORTER = "an axis above 1 becomes 2"
_MORE = {
    "pp": "first, middle and last stage",
    "cp": "two neighbours of each rank, or two levels",
    "tp": "two query groups, on two ranks each",
}


def axes(case: Case) -> Iterator[Change]:
    """Sizes of the axes; what belongs to one that is left out goes with it."""
    flags, large, small = case.flags, case.large, case.small
    for name, option in OPTIONS.items():
        size = getattr(small, name)
        if flags.has(option):
            left_out = size == 1 and getattr(large, name) > 1
            why = "another job has this axis" if left_out else _SHORTER
            why = _MORE.get(name, why) if size > 2 else why
            yield Change(option, (str(size),), why)
    if flags.has("hierarchical_context_parallel_sizes") and small.cp > 1:
        levels = flags.text("hierarchical_context_parallel_sizes").split()
        short = tuple(str(min(2, int(level))) for level in levels if level.isdigit())
        yield Change("hierarchical_context_parallel_sizes", short, "both levels stay")
    if flags.integer("num_distributed_optimizer_instances", 1) > 1:
        count, why = ("2", _SHORTER) if small.dp > 2 else ("1", "too few data-parallel ranks")
        yield Change("num_distributed_optimizer_instances", (count,), why)
    yield from _if_set(
        case,
        _SHORTER,
        tensor_parallel_num_weight_shards=small.tp * small.gtp,
        expert_tensor_parallel_num_weight_shards=small.etp * small.egtp,
    )
    for name, options in _GOING.items():
        if getattr(large, name) > 1 and getattr(small, name) == 1:
            why = f"this job does not have {name}: another one has"
            yield from _gone(case, why, *options.split())
    yield from _gone(case, "its buffers are for the full sizes", "tp_comm_overlap_cfg")


_GOING = {
    "tp": "sequence_parallel tp_comm_overlap distribute_saved_activations "
    "defer_embedding_wgrad_compute wgrad_deferral_limit",
    "cp": "cp_comm_type hierarchical_context_parallel_sizes",
    "pp": "pipeline_model_parallel_layout num_layers_per_virtual_pipeline_stage "
    "num_virtual_stages_per_pipeline_rank decoder_first_pipeline_num_layers "
    "decoder_last_pipeline_num_layers account_for_embedding_in_pipeline_split "
    "account_for_loss_in_pipeline_split defer_embedding_wgrad_compute wgrad_deferral_limit "
    "overlap_p2p_comm overlap_p2p_comm_warmup_flush microbatch_group_size_per_vp_stage "
    "overlap_param_gather_with_optimizer_step mtp_standalone",
    "ep": "overlap_moe_expert_parallel_comm delay_wgrad_compute "
    "ep_overlap_early_attn_memory_release overlap_dispatch_backward_with_experts_wgrad",
}
"""Options that Megatron refuses, or has no use for, without an axis."""


_HYBRID = ("hybrid_layer_pattern", "hybrid_override_pattern")
_HETEROGENEOUS = (
    "heterogeneous_layers_config_path",
    "heterogeneous_layers_config_encoded_json",
)


def layers(case: Case) -> Iterator[Change]:
    """Layers by stage and chunk, uneven ends, and patterns over layers."""
    flags, depth = case.flags, case.depth
    for given in filter(flags.has, _HETEROGENEOUS):
        raise TTraceError(f"--{given.replace('_', '-')}: its layers cannot be shrunk")
    if hybrid := next(filter(flags.has, _HYBRID), ""):
        ends = bf16_ends(flags).values() if flags.has("first_last_layers_bf16") else ()
        segments = case.small.pp * case.small.chunks
        pattern = patterns.shrink_hybrid(flags.text(hybrid), segments, *ends)
        yield Change(hybrid, (pattern,), "one layer of each kind per stage")
        yield from _gone(case, "the pattern says it", "num_layers")
        yield from _some_layers(flags)
        return
    why = "layers per stage and chunk, of every kind"
    stack = 2 * case.small.pp
    yield from _if_set(
        case, why, encoder_num_layers=stack, decoder_num_layers=stack, num_layers=depth.layers
    )
    if depth.stages:
        yield Change(
            "pipeline_model_parallel_layout",
            ("|".join(depth.stages),),
            "first, last and different stages",
        )
    yield from _sizes("as uneven as before", **depth.ends)
    if case.small.pp > 1:
        # Also where a stage has a single chunk.
        yield from _if_set(case, why, num_layers_per_virtual_pipeline_stage=depth.per_chunk)
    if case.small.pp > 1 and case.small.chunks > 1:
        chunks = case.small.chunks
        yield from _if_set(
            case, "first, middle and last chunk", num_virtual_stages_per_pipeline_rank=chunks
        )
    for option, value in case.frequencies.items():
        if isinstance(value, list):
            words = patterns.write_layers(patterns.compress(value, depth.layers))
            yield Change(option, (words,), "the same order of kinds of layers")
        elif value > 1:
            yield Change(option, (str(_period(case, value)),), "both kinds of layers within few")
    yield from _shared_choices(case)
    if flags.integer("mtp_num_layers") > 0:
        depths = sum(stage.count("m") for stage in depth.stages) or min(
            2, flags.integer("mtp_num_layers")
        )
        yield from _sizes("one, or two", mtp_num_layers=depths)
    yield from _some_layers(flags)


def _period(case: Case, value: int) -> int:
    """A period of kinds of layers; if it did not divide stages into equal ones, it still does not.

    A layer that is numbered within its stage would be of the right kind otherwise.
    """
    depth, large = case.depth, case.large
    if case.flags.integer("num_layers", value) // (large.pp * large.chunks) % value == 0:
        return 2
    fitting = (n for n in range(2, value + 1) if depth.layers % n == 0 < depth.per_chunk % n)
    return max(fitting, default=2)


def _shared_choices(case: Case) -> Iterator[Change]:
    """Every other layer of sparse attention uses the keys that the layer before it chose.

    Megatron lets no stage begin with such a layer.
    """
    flags, depth, small = case.flags, case.depth, case.small
    if flags.integer("dsa_indexer_topk_freq") < 2:
        return
    alike = depth.per_chunk * small.chunks
    first, last = (depth.ends.get(end, alike) // small.chunks for end in ENDS)
    sizes = [first, *[depth.per_chunk] * (small.pp - 2), last][: small.pp] * small.chunks
    sizes[0] -= small.pp > 1 and flags.has("account_for_embedding_in_pipeline_split")
    if depth.stages:
        sizes = [stage.count("t") for stage in depth.stages]
    begins = [1 + before for before in itertools.accumulate(sizes[:-1], initial=0)]
    for offset in (1, 2):
        if all(begin <= offset or (begin - offset) % 2 == 0 for begin in begins):
            why = "layers that choose keys, and others"
            yield from _sizes(why, dsa_indexer_topk_freq=2, dsa_indexer_skip_topk_offset=offset)
            return


def _some_layers(flags: CommandFlags) -> Iterator[Change]:
    """Numbers of layers that are treated unlike the others: no more than there are."""
    if flags.has("first_last_layers_bf16"):
        yield from _sizes("one layer at an end", **bf16_ends(flags))
    for option in ("recompute_num_layers", "cpu_offloading_num_layers"):
        if flags.integer(option) > 0:
            yield Change(option, (str(min(2, flags.integer(option))),), "one, or several")


def width(case: Case) -> Iterator[Change]:
    """Hidden sizes, heads and groups."""
    flags, hidden, unit = case.flags, case.hidden, case.unit
    heads, groups = case.heads
    before = flags.integer("hidden_size", 1)
    why = "rows of a few blocks"
    yield from _sizes(why, hidden_size=hidden)
    yield from _sizes("heads on every rank", num_attention_heads=heads)
    if groups:
        yield from _sizes("groups to ranks as before", num_query_groups=groups)
    fits = flags.integer("kv_channels") * flags.integer("num_attention_heads") == before
    size = hidden // heads if fits else (unit if unit * heads != hidden else 2 * unit)
    relation = "" if fits else "not "
    why_channels = f"product with heads as before: {relation}the hidden size"
    yield from _if_set(case, why_channels, kv_channels=size)
    times = 4 if flags.integer("ffn_hidden_size") == 4 * before else 2
    padded = _padded(case, "ffn_hidden_size", case.large.tp * case.large.gtp, case.small.tp)
    yield from _if_set(case, why, ffn_hidden_size=times * hidden + padded)
    if flags.integer("mup_base_hidden_size") > 0:
        ratio = max(1, before // flags.integer("mup_base_hidden_size"))
        yield Change("mup_base_hidden_size", (str(max(1, hidden // ratio)),), "the same ratio")
    if flags.has("mrope_section"):
        half = hidden // heads // 2
        part = half // 3
        sections = (str(half - 2 * part), str(part), str(part))
        yield Change("mrope_section", sections, "three sections of a head")


def _padded(case: Case, option: str, ranks: int, divided: int) -> int:
    """What makes a rank's rows a fraction of a block, if weights in shards are padded to blocks.

    ``ranks`` divide the rows of the large job's weight, ``divided`` its tensor in the small one.
    """
    flags, large = case.flags, case.large
    rows = flags.integer(option) * (2 if flags.has("swiglu") else 1)
    is_whole = large.gtp * large.egtp == 1 or rows % (16 * ranks) == 0
    return 0 if is_whole or flags.has("fp8") or flags.has("fp4") else 8 * divided


def _hybrid(case: Case) -> str:
    """A letter for each layer of a hybrid model; else empty."""
    return next(filter(None, map(case.flags.text, _HYBRID)), "")


def latent_attention(case: Case) -> Iterator[Change]:
    """Multi-latent attention, and the indexer of sparse attention."""
    flags, unit = case.flags, case.unit
    why = "a few blocks"
    quantised = flags.has("fp8") or flags.has("fp4")
    same = flags.integer("v_head_dim", 128) == flags.integer("qk_head_dim", 128)
    if flags.has("multi_latent_attention"):
        rotated = unit if quantised else unit // 2
        yield from _if_set(case, why, q_lora_rank=2 * unit)
        yield from _sizes(why, kv_lora_rank=2 * unit, qk_head_dim=unit, qk_pos_emb_head_dim=rotated)
        yield from _sizes("to the keys as before", v_head_dim=unit if same else 2 * unit)
    if flags.text("experimental_attention_variant") == "dsa" or "D" in _hybrid(case):
        tokens = flags.integer("dsa_indexer_topk", case.sequence)
        before = flags.integer("seq_length", case.sequence)
        kept = max(1, case.sequence * min(tokens, before) // max(1, before))
        yield from _sizes("the same share of the sequence", dsa_indexer_topk=kept)
        yield from _sizes("a few", dsa_indexer_n_heads=4)
        yield from _sizes(why, dsa_indexer_head_dim=2 * unit)


_DELTA_NETS = {"gated_delta_net", "gdn", "gdn2"}


def other_mixers(case: Case) -> Iterator[Change]:
    """Linear attention and Mamba layers."""
    flags, unit, tp = case.flags, case.unit, case.small.tp
    pattern = _hybrid(case)
    if flags.text("experimental_attention_variant") in _DELTA_NETS or "G" in pattern:
        keys = flags.integer("linear_num_key_heads", 16)
        ratio = min(2, max(1, flags.integer("linear_num_value_heads", 32) // max(1, keys)))
        heads = tp * max(2, case.small.cp)
        yield from _sizes("heads on every rank", linear_num_key_heads=heads)
        yield from _sizes("to the keys as before", linear_num_value_heads=heads * ratio)
        yield from _sizes("a block", linear_key_head_dim=unit, linear_value_head_dim=unit)
    if "M" in pattern:
        groups = tp * min(2, max(1, flags.integer("mamba_num_groups", 8) // case.large.tp))
        yield from _sizes("groups on every rank", mamba_num_groups=groups)
        # In FP8 a rank's heads fill a block: they are part of a projection's rows.
        block = unit * tp if flags.has("fp8") or flags.has("fp4") else 8
        heads = block * -(-2 * groups // block)
        yield from _sizes("heads in every group", mamba_num_heads=heads)
        yield from _sizes("a block", mamba_head_dim=unit, mamba_state_dim=unit)


def experts(case: Case) -> Iterator[Change]:
    """Experts and groups of them on every rank."""
    flags, small, unit = case.flags, case.small, case.unit
    count = flags.integer("num_experts")
    if count <= 0:
        return
    chosen = flags.integer("moe_router_topk", 2)
    groups = flags.integer("moe_router_num_groups")
    groups = groups if groups > 1 else 0
    limited = flags.integer("moe_router_group_topk", 1)
    few = min(2, chosen)
    step = math.lcm(small.ep, 2) if groups else small.ep
    per_rank = min(2, max(1, count // case.large.ep))
    if per_rank > 1 < small.ep and 3 * small.ep <= count:
        per_rank = 3  # two experts on each of two ranks are sorted the same way forth and back
    short = max(step, small.ep * per_rank)
    while short < count and (short < 2 * few or (groups and short < 4)):
        short += step
    # One expert on a rank is a case of its own in Megatron's dispatchers.
    apart = count // case.large.ep == 1 < short // small.ep
    why = f"{short // small.ep} on each rank instead of 1" if apart else "experts on every rank"
    yield Change("num_experts", (str(short),), why, lost=apart)
    tokens_go_to = few if chosen < count else short
    yield from _if_set(case, "one, or several", moe_router_topk=tokens_go_to)
    if groups:
        yield from _sizes("more than one group", moe_router_num_groups=2)
        size = 1 if limited < groups else 2
        yield from _sizes("not all groups, if that was so", moe_router_group_topk=size)
    why, block = "a few blocks on every rank", 2 * unit
    padded = _padded(case, "moe_ffn_hidden_size", case.large.etp * case.large.egtp, small.etp)
    yield from _if_set(case, why, moe_ffn_hidden_size=block * small.etp + padded)
    yield from _if_set(case, why, moe_shared_expert_intermediate_size=block * small.tp)
    if flags.integer("moe_latent_size") > 0:
        yield from _sizes("half of the hidden size", moe_latent_size=case.hidden // 2)


def length(case: Case) -> Iterator[Change]:
    """Tokens of a sequence: enough for every rank, and windows that end within it."""
    flags, short = case.flags, case.sequence
    why = "tokens for every rank"
    before = 1
    for change in _if_set(case, why, seq_length=short, encoder_seq_length=short):
        before = max(before, flags.integer(change.option, 1))
        yield change
    if flags.has("decoder_seq_length"):
        shorter = flags.integer("decoder_seq_length", 1) < before
        size = short // 2 if shorter else short
        yield from _sizes("shorter than the encoder's, if so before", decoder_seq_length=size)
    if flags.has("max_position_embeddings"):
        positions = flags.integer("max_position_embeddings", 1)
        size = short if positions <= before else 2 * short
        yield from _sizes("more than the sequence, if so before", max_position_embeddings=size)
        if flags.has("yarn_original_max_position_embeddings"):
            original = flags.integer("yarn_original_max_position_embeddings", 1)
            size = max(1, size * original // max(1, positions))
            yield from _sizes("the same ratio", yarn_original_max_position_embeddings=size)
    if flags.has("window_size"):
        ends = [end.strip("()") for end in flags.text("window_size").replace(",", " ").split()]
        sizes = [str(max(1, short // 4 - 1)) if end.strip("0").isdigit() else end for end in ends]
        separate = "," in flags.text("window_size")
        values = (",".join(sizes),) if separate else tuple(sizes)
        yield Change("window_size", values, "a part of the sequence")


def batch(case: Case) -> Iterator[Change]:
    """Several microbatches if there were, enough for every phase of a pipeline schedule."""
    flags, small = case.flags, case.small
    micro = max(1, flags.integer("micro_batch_size", 1))
    short = min(2, micro)
    yield from _sizes("one, or several sequences", micro_batch_size=short)
    steps = [step.partition(":") for step in flags.text("step_batch_size_schedule").split()]
    sizes = [int(size) for _, _, size in steps if size.isdigit()]
    if len(sizes) < len(steps):
        return  # Megatron says what is wrong
    batch = max(sizes, default=flags.integer("global_batch_size"))
    before = batch // (micro * case.large.dp) if batch else 1
    count = _microbatches(case, before)
    size = short * small.dp * count
    if steps:
        words = [f"{start}:{size * number}" for number, (start, *_) in enumerate(steps, 1)]
        yield Change("step_batch_size_schedule", (" ".join(words),), "steps as before")
        return
    if flags.has("rampup_batch_size"):
        samples = flags.text("rampup_batch_size").split()[-1]
        yield Change("rampup_batch_size", (str(size), str(size), samples), "a ramp of one step")
        size *= 2
    if batch:
        yield from _sizes("microbatches for every phase of a step", global_batch_size=size)
    if 0 < flags.integer("wgrad_deferral_limit") < before:
        why = "some microbatches are beyond it"
        yield from _sizes(why, wgrad_deferral_limit=max(1, count // 2))


def _microbatches(case: Case, before: int) -> int:
    """Microbatches per data-parallel rank.

    In a pipeline, as before, they may all be in the warm-up of the first stage: fewer than stages,
    or a single group of an interleaved schedule.
    """
    large, small = case.large, case.small
    if before <= 1:
        return 1
    if small.pp == 1:
        return min(3, before)  # one in the middle, and not as many as an axis has ranks
    if small.chunks == 1:
        return 2 * small.pp if before >= large.pp else max(2, small.pp - 1)
    group = case.flags.integer("microbatch_group_size_per_vp_stage") or large.pp
    ahead = 2 * (large.pp - 1) + (large.chunks - 1) * group
    if before * large.chunks <= ahead:
        return _group(case)
    return _group(case) + (small.pp if before % group else _group(case))


def _group(case: Case) -> int:
    """Microbatches of a group in an interleaved schedule: at least the stages."""
    more = case.flags.integer("microbatch_group_size_per_vp_stage") > case.large.pp
    return case.small.pp + more


def groups_of_microbatches(case: Case) -> Iterator[Change]:
    """Of an interleaved schedule."""
    if case.flags.has("microbatch_group_size_per_vp_stage") and case.small.chunks > 1:
        why = "more than stages, if so before"
        yield from _sizes(why, microbatch_group_size_per_vp_stage=_group(case))


def buckets(case: Case) -> Iterator[Change]:
    """Several buckets of gradients: Megatron's own size would put a small model into one."""
    flags = case.flags
    if flags.has("ddp_bucket_size") or (
        flags.has("overlap_grad_reduce")
        and not flags.has("ddp_num_buckets")
        and not flags.has("use_megatron_fsdp")
        and not flags.has("use_torch_fsdp2")
    ):
        yield Change("ddp_bucket_size", ("20000",), "several buckets, as in a large model")


def offloading(case: Case) -> Iterator[Change]:
    """Of single activations: Megatron's own limit is above all of a small model."""
    if case.flags.has("fine_grained_activation_offloading"):
        yield from _sizes("those of a small model, too", min_offloaded_tensor_size=1)


def vocabulary(case: Case) -> Iterator[Change]:
    """That of the data: 257 tokens, which need some padding."""
    if case.own_data:
        return
    own = "that of the data instead"
    yield from _gone(case, own, "vocab_size", "padded_vocab_size", "vocab_extra_ids")
    if case.flags.integer("make_vocab_size_divisible_by") > 128:
        yield Change("make_vocab_size_divisible_by", ("128",), "a padded vocabulary")


def schedule(case: Case) -> Iterator[Change]:
    """One traced iteration; learning rates as they are."""
    flags = case.flags
    yield Change("train_iters", ("3",), "the first is checked")
    yield Change("eval_iters", ("0",), "nothing is evaluated")
    why = "nothing is evaluated" if flags.has("eval_interval") else "Megatron needs one"
    yield Change("eval_interval", ("1000",), why)
    if not flags.has("lr"):
        yield Change("lr", ("1e-3",), "Megatron needs one")
    if flags.text("lr_decay_style").upper() == "WSD":
        yield Change("lr_wsd_decay_iters", ("1",), "the schedule's last phase")


def main_weights(case: Case) -> Iterator[Change]:
    """In fp32: a check refuses others (run/requirements.py)."""
    if case.flags.text("main_params_dtype") == "fp16":
        why = "each rank rounds its main weights with a different scale"
        yield Change("main_params_dtype", ("fp32",), why, lost=True)


def data(case: Case) -> Iterator[Change]:
    """Own data, with tokens of its own for what is done with samples."""
    if case.own_data:
        return
    flags = case.flags
    if flags.has("sft") and not case.can_chat:
        why = "needs the packages datasets and transformers, which are not installed"
        yield Change("sft", None, why, lost=True)
    if flags.has("mock_data"):
        yield Change("mock_data", None, "own data instead")
        yield from _gone(case, "without effect on mock data", "fim_data")
    elif flags.has("fim_data"):
        for name, number in documents.FIM_TOKENS.items():
            yield Change(f"fim_{name}_token", (str(number),), "own data's")
        if flags.has("fim_split_sample"):
            yield Change("fim_split_sample", (str(documents.LINE_END),), "own data's: a line's end")
        for option in ("fim_rate", "fim_spm_rate"):
            yield Change(option, ("0.5",), "samples of both kinds in one step")
    if flags.text("dataloader_type") == "external":
        yield Change("dataloader_type", None, "the script's own loader is not known", lost=True)


RULES: tuple[Callable[[Case], Iterator[Change]], ...] = (
    axes,
    layers,
    width,
    latent_attention,
    other_mixers,
    experts,
    length,
    batch,
    groups_of_microbatches,
    buckets,
    offloading,
    vocabulary,
    schedule,
    main_weights,
    data,
)
