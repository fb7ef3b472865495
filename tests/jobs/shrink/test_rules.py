# SPDX-License-Identifier: Apache-2.0
"""Every rule of shrinking, one by one."""

import dataclasses
import re

import pytest

from megatron_ttrace.jobs.shrink import axes, rules
from megatron_ttrace.jobs.shrink.axes import Axes
from megatron_ttrace.jobs.shrink.case import Case
from megatron_ttrace.jobs.shrink.command_flags import CommandFlags


def case(text, ranks=None, kept=None):
    """A large job and the axes of its small one."""
    flags = CommandFlags.parse(text.split())
    large = axes.of_large(flags, ranks)
    return Case(flags, large, axes.of_small(flags, large, kept))


def changes(rule, text, ranks=None, kept=None):
    """What a rule changes: each option with its value; without one if its flag goes."""
    return written(rule(case(text, ranks, kept)))


def written(made):
    """Changes as one text."""
    return ", ".join(
        change.option if change.values is None else f"{change.option}={' '.join(change.values)}"
        for change in made
    )


def table(text):
    """Rows of flags and, indented, what becomes of their options."""
    rows = re.findall(r"^((?:-.*\n)+)((?: .*\n)*)", text, re.MULTILINE)
    return [(" ".join(flags.split()), " ".join(changed.split())) for flags, changed in rows]


PIPELINE = "--pipeline-model-parallel-size 8"


@pytest.mark.parametrize(
    ("text", "expected"),
    table("""
--num-layers 96
    num_layers=2
--pipeline-model-parallel-size 8 --num-layers 96
    num_layers=6
--pipeline-model-parallel-size 8 --num-layers 95
    num_layers=7
--pipeline-model-parallel-size 8 --num-layers 64 --num-layers-per-virtual-pipeline-stage 4
    num_layers=12, num_layers_per_virtual_pipeline_stage=2
--pipeline-model-parallel-size 8 --num-layers 32 --num-layers-per-virtual-pipeline-stage 4
    num_layers=6, num_layers_per_virtual_pipeline_stage=2
--pipeline-model-parallel-size 8 --num-layers 32 --num-layers-per-virtual-pipeline-stage 1
    num_layers=12, num_layers_per_virtual_pipeline_stage=1
--pipeline-model-parallel-size 8 --num-layers 62 --account-for-embedding-in-pipeline-split
--account-for-loss-in-pipeline-split
    num_layers=4
--pipeline-model-parallel-size 8 --num-layers 62 --decoder-last-pipeline-num-layers 6
    num_layers=5, decoder_last_pipeline_num_layers=1
--pipeline-model-parallel-size 8 --num-layers 61 --decoder-first-pipeline-num-layers 10
--decoder-last-pipeline-num-layers 3
    num_layers=6, decoder_first_pipeline_num_layers=3, decoder_last_pipeline_num_layers=1
--pipeline-model-parallel-size 8 --num-layers 61
--pipeline-model-parallel-layout Et*3|(tt|)*29m|L --mtp-num-layers 1
    num_layers=11, pipeline_model_parallel_layout=Ett|t|t|t|t|t|t|t|t|t|m|L, mtp_num_layers=1
--num-layers 61 --moe-layer-freq ([0]*3+[1]*58)
    num_layers=2, moe_layer_freq=([0]*1+[1]*1)
--num-layers 48 --linear-attention-freq 4
    num_layers=2, linear_attention_freq=2
--pipeline-model-parallel-size 2 --num-layers 4 --no-rope-freq 4
    num_layers=4, no_rope_freq=4
--pipeline-model-parallel-size 2 --num-layers 48 --no-rope-freq 4
    num_layers=4, no_rope_freq=2
--num-layers 48 --dsa-indexer-topk-freq 4 --dsa-indexer-skip-topk-offset 3
    num_layers=2, dsa_indexer_topk_freq=2, dsa_indexer_skip_topk_offset=1
--num-layers 48 --dsa-indexer-topk-freq 1
    num_layers=2
--pipeline-model-parallel-size 8 --num-layers 62 --decoder-first-pipeline-num-layers 20
--dsa-indexer-topk-freq 4 --dsa-indexer-skip-topk-offset 3
    num_layers=7, decoder_first_pipeline_num_layers=3, dsa_indexer_topk_freq=2,
    dsa_indexer_skip_topk_offset=2
--pipeline-model-parallel-size 8 --pipeline-model-parallel-layout Ett|(ttt|)*6L
--dsa-indexer-topk-freq 3
    pipeline_model_parallel_layout=Et|tt|L, dsa_indexer_topk_freq=2,
    dsa_indexer_skip_topk_offset=2
--pipeline-model-parallel-size 8 --num-layers 32 --num-layers-per-virtual-pipeline-stage 1
--dsa-indexer-topk-freq 2
    num_layers=12, num_layers_per_virtual_pipeline_stage=1
--num-layers 48 --first-last-layers-bf16 --num-layers-at-start-in-bf16 0
--num-layers-at-end-in-bf16 14
    num_layers=2, num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=1
--num-layers 24 --mtp-num-layers 3
    num_layers=2, mtp_num_layers=2
--num-layers 24 --recompute-num-layers 6
    num_layers=4, recompute_num_layers=2
--num-layers 20 --recompute-num-layers 6
    num_layers=3, recompute_num_layers=2
--num-layers 24 --recompute-num-layers 1
    num_layers=2, recompute_num_layers=1
--pipeline-model-parallel-size 2 --hybrid-layer-pattern M-M*-|MM --num-layers 9
    hybrid_layer_pattern=M-*|M, num_layers
--hybrid-layer-pattern MEM*MEM*MEM* --first-last-layers-bf16 --num-layers-at-end-in-bf16 9
--recompute-num-layers 3
    hybrid_layer_pattern=ME*ME*, num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=1,
    recompute_num_layers=2
--encoder-num-layers 12
    encoder_num_layers=2
--num-layers 64 --cpu-offloading-num-layers 10
    num_layers=3, cpu_offloading_num_layers=2
--num-layers 64 --use-megatron-fsdp
    num_layers=4
--pipeline-model-parallel-size 2 --num-layers 64 --overlap-moe-expert-parallel-comm
--num-virtual-stages-per-pipeline-rank 8
    num_layers=18, num_virtual_stages_per_pipeline_rank=3
"""),
)
def test_layers(text, expected):
    """By stage and chunk; uneven ends, patterns and both kinds of layers stay."""
    assert changes(rules.layers, text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    table("""
--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split --num-layers 38
--first-last-layers-bf16
    num_layers=4, num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=1
--decoder-first-pipeline-num-layers 8 --decoder-last-pipeline-num-layers 8 --num-layers 40
--first-last-layers-bf16
    num_layers=4, decoder_first_pipeline_num_layers=2, decoder_last_pipeline_num_layers=2,
    num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=1
--pipeline-model-parallel-layout Et*8|t*8|t*8|t*8L --first-last-layers-bf16
    pipeline_model_parallel_layout=Ett|ttL, num_layers_at_start_in_bf16=1,
    num_layers_at_end_in_bf16=1
--pipeline-model-parallel-layout E|t*8|t*8|L --moe-layer-freq [0]*1+[1]*15
    pipeline_model_parallel_layout=Ett|L, moe_layer_freq=([0]*1+[1]*1)
--pipeline-model-parallel-layout E(tttt|)*3L --moe-layer-freq [0]*4+[1]*8
    pipeline_model_parallel_layout=Ett|L, moe_layer_freq=([0]*1+[1]*1)
--hybrid-layer-pattern M-|M*|M-|M* --first-last-layers-bf16
    hybrid_layer_pattern=M-M-|M*M*, num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=1
"""),
)
def test_two_stages_have_layers_of_every_kind(text, expected):
    """As many as it takes for a kind that is not in the first layer, or not at the ends."""
    flags = CommandFlags.parse(f"--pipeline-model-parallel-size 4 {text}".split())
    large = axes.of_large(flags, 4)
    small = axes.of_small(flags, large, stages=2)
    assert written(rules.layers(Case(flags, large, small))) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "num_attention_heads=4"),
        ("--tensor-model-parallel-size 8", "num_attention_heads=4"),
        (
            "--tensor-model-parallel-size 8 --context-parallel-size 4 --cp-comm-type a2a",
            "num_attention_heads=8",
        ),
        (
            "--tensor-model-parallel-size 8 --group-query-attention --num-query-groups 8",
            "num_attention_heads=4, num_query_groups=2",
        ),
        (
            "--tensor-model-parallel-size 4 --group-query-attention --num-query-groups 16",
            "num_attention_heads=8, num_query_groups=4",
        ),
        (
            "--tensor-model-parallel-size 8 --group-query-attention --num-query-groups 2",
            "num_attention_heads=8, num_query_groups=2",
        ),
        (
            "--tensor-model-parallel-size 8 --group-query-attention --num-query-groups 1",
            "num_attention_heads=4, num_query_groups=1",
        ),
        ("--kv-channels 128", "num_attention_heads=4, kv_channels=16"),
        ("--kv-channels 192", "num_attention_heads=4, kv_channels=32"),
        ("--ffn-hidden-size 32768", "num_attention_heads=4, ffn_hidden_size=256"),
        ("--ffn-hidden-size 22016", "num_attention_heads=4, ffn_hidden_size=128"),
        (
            "--ffn-hidden-size 22024 --tensor-parallel-num-weight-shards 2 --swiglu",
            "num_attention_heads=4, ffn_hidden_size=136",
        ),
        (
            "--ffn-hidden-size 22016 --tensor-parallel-num-weight-shards 2",
            "num_attention_heads=4, ffn_hidden_size=128",
        ),
        ("--mup-base-hidden-size 4096", "num_attention_heads=4, mup_base_hidden_size=32"),
        ("--mrope-section 16 24 24", "num_attention_heads=4, mrope_section=4 2 2"),
    ],
)
def test_width(text, expected):
    """Heads and groups on every rank, and their relation to the hidden size."""
    text = f"--hidden-size 8192 --num-attention-heads 64 {text}"
    assert changes(rules.width, text) == f"hidden_size=64, {expected}"


@pytest.mark.parametrize(
    ("recipe", "hidden"),
    [("tensorwise", "64"), ("delayed", "64"), ("mxfp8", "128"), ("blockwise", "512")],
)
def test_blocks_of_fp8(recipe, hidden):
    """Matrices have whole blocks of what is quantised together."""
    text = f"--hidden-size 8192 --fp8-format e4m3 --fp8-recipe {recipe}"
    assert changes(rules.width, text).startswith(f"hidden_size={hidden}, ")


def test_latent_attention():
    """Ranks and heads of it; sparse attention looks at the same share of a sequence."""
    text = "--multi-latent-attention --q-lora-rank 1536 --v-head-dim 128 --qk-head-dim 192"
    assert changes(rules.latent_attention, text) == (
        "q_lora_rank=32, kv_lora_rank=32, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=32"
    )
    for sparse in ("--experimental-attention-variant dsa", "--hybrid-layer-pattern MD-"):
        text = f"{sparse} --dsa-indexer-topk 1024 --seq-length 4096"
        assert changes(rules.latent_attention, text) == (
            "dsa_indexer_topk=16, dsa_indexer_n_heads=4, dsa_indexer_head_dim=32"
        )


def test_other_mixers():
    """Heads and groups of linear attention and of Mamba on every rank."""
    text = "--tensor-model-parallel-size 4"
    heads = "--linear-num-key-heads 16 --linear-num-value-heads 32"
    for gated in (
        "--experimental-attention-variant gated_delta_net",
        "--experimental-attention-variant gdn",
        "--hybrid-layer-pattern G*-",
    ):
        assert changes(rules.other_mixers, f"{text} {gated} {heads}") == (
            "linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=16, "
            "linear_value_head_dim=16"
        )
    assert changes(rules.other_mixers, f"{text} --hybrid-layer-pattern M-M*") == (
        "mamba_num_groups=4, mamba_num_heads=8, mamba_head_dim=16, mamba_state_dim=16"
    )
    assert changes(rules.other_mixers, "--hybrid-layer-pattern *-") == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    table("""
--num-experts 64
    num_experts=4
--num-experts 8 --moe-router-topk 1
    num_experts=2, moe_router_topk=1
--num-experts 256 --expert-model-parallel-size 64 --moe-router-topk 8 --moe-router-num-groups 8
--moe-router-group-topk 4
    num_experts=6, moe_router_topk=2, moe_router_num_groups=2, moe_router_group_topk=1
--num-experts 8 --expert-model-parallel-size 8 --moe-router-topk 2
    num_experts=4, moe_router_topk=2
--num-experts 8 --expert-model-parallel-size 4
    num_experts=6
--num-experts 64 --moe-router-num-groups 1 --moe-router-group-topk 1
    num_experts=4
--num-experts 4 --moe-router-topk 4
    num_experts=4, moe_router_topk=4
--num-experts 64 --moe-ffn-hidden-size 2048 --tensor-model-parallel-size 4
--moe-shared-expert-intermediate-size 4096 --moe-latent-size 1024
    num_experts=4, moe_ffn_hidden_size=64, moe_shared_expert_intermediate_size=64,
    moe_latent_size=32
--num-experts 64 --moe-ffn-hidden-size 1864 --expert-tensor-parallel-num-weight-shards 2
    num_experts=4, moe_ffn_hidden_size=40
--num-layers 2
"""),
)
def test_experts(text, expected):
    """On every rank more than one, if there were; more than a token chooses, if there were."""
    assert changes(rules.experts, text) == expected


@pytest.mark.parametrize(
    ("experts", "chosen", "lost"), [(8, 2, True), (8, 1, False), (16, 2, False)]
)
def test_one_expert_on_a_rank_becomes_several(experts, chosen, lost):
    """What the small job then does not run is listed."""
    text = f"--num-experts {experts} --expert-model-parallel-size 8 --moe-router-topk {chosen}"
    [is_lost] = [
        change.lost for change in rules.experts(case(text)) if change.option == "num_experts"
    ]
    assert is_lost is lost


@pytest.mark.parametrize(
    ("text", "expected"),
    table("""
--seq-length 8192 --max-position-embeddings 8192
    seq_length=64, max_position_embeddings=64
--seq-length 4096 --max-position-embeddings 163840 --yarn-original-max-position-embeddings 40960
    seq_length=64, max_position_embeddings=128, yarn_original_max_position_embeddings=32
--seq-length 4096 --window-size 127,0
    seq_length=64, window_size=15,0
--seq-length 4096 --window-size 127 -1
    seq_length=64, window_size=15 -1
--seq-length 8192 --tensor-model-parallel-size 8 --context-parallel-size 8
--hierarchical-context-parallel-sizes 4 2
    seq_length=128
--encoder-seq-length 512 --decoder-seq-length 128
    encoder_seq_length=64, decoder_seq_length=32
"""),
)
def test_length(text, expected):
    """Tokens for every rank; windows end within a sequence."""
    assert changes(rules.length, text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    table("""
--micro-batch-size 4 --global-batch-size 64
    micro_batch_size=2, global_batch_size=12
--micro-batch-size 1 --global-batch-size 2
    micro_batch_size=1, global_batch_size=2
--micro-batch-size 1
    micro_batch_size=1
--micro-batch-size 1 --global-batch-size 32 --pipeline-model-parallel-size 8
    micro_batch_size=1, global_batch_size=12
--micro-batch-size 1 --global-batch-size 160 --pipeline-model-parallel-size 8 --num-layers 32
--microbatch-group-size-per-virtual-pipeline-stage 10 --num-virtual-stages-per-pipeline-rank 2
    micro_batch_size=1, global_batch_size=16
--micro-batch-size 1 --global-batch-size 16 --pipeline-model-parallel-size 8 --num-layers 32
--num-virtual-stages-per-pipeline-rank 2
    micro_batch_size=1, global_batch_size=6
--micro-batch-size 1 --global-batch-size 8 --pipeline-model-parallel-size 8
    micro_batch_size=1, global_batch_size=4
--micro-batch-size 1 --global-batch-size 32 --pipeline-model-parallel-size 8
--wgrad-deferral-limit 12
    micro_batch_size=1, global_batch_size=12, wgrad_deferral_limit=3
--micro-batch-size 1 --global-batch-size 32 --pipeline-model-parallel-size 8
--wgrad-deferral-limit 22
    micro_batch_size=1, global_batch_size=12
"""),
)
def test_batch(text, expected):
    """Accumulation stays, and every phase of a pipeline's schedule, or only its warm-up."""
    assert changes(rules.batch, text) == expected


def test_batches_that_grow():
    """A ramp and a schedule keep their steps."""
    text = "--micro-batch-size 2 --global-batch-size 64 --rampup-batch-size 8 8 99"
    assert changes(rules.batch, text).endswith("rampup_batch_size=12 12 99, global_batch_size=24")
    flags = CommandFlags.parse(
        ["--micro-batch-size", "1", "--step-batch-size-schedule", "0:384 200B:768"]
    )
    growing = Case(flags, Axes(dp=2), Axes(dp=2))
    options = {change.option: change.values for change in rules.batch(growing)}
    assert options["step_batch_size_schedule"] == ("0:6 200B:12",)


def test_what_megatron_would_refuse():
    """It says so itself, in the small job."""
    assert "schedule" not in changes(rules.batch, "--step-batch-size-schedule 0:64,1000:256")
    assert "window_size=a 15" in changes(rules.length, "--seq-length 4096 --window-size a 9")


def test_groups_of_microbatches():
    """More than pipeline stages, if so before."""
    text = f"{PIPELINE} --num-virtual-stages-per-pipeline-rank 2 --num-layers 32"
    flag = "--microbatch-group-size-per-virtual-pipeline-stage"
    assert changes(rules.groups_of_microbatches, f"{text} {flag} 10", 8) == (
        "microbatch_group_size_per_vp_stage=4"
    )
    assert changes(rules.groups_of_microbatches, f"{text} {flag} 8", 8) == (
        "microbatch_group_size_per_vp_stage=3"
    )


def test_buckets():
    """Several, where gradients are reduced bucket by bucket."""
    assert changes(rules.buckets, "--overlap-grad-reduce") == "ddp_bucket_size=20000"
    assert changes(rules.buckets, "--overlap-grad-reduce --ddp-num-buckets 8") == ""
    assert changes(rules.buckets, "--overlap-grad-reduce --use-megatron-fsdp") == ""
    assert changes(rules.buckets, "") == ""


def test_offloaded_activations():
    """None of a small model would be."""
    words = "--fine-grained-activation-offloading --offload-modules core_attn"
    assert changes(rules.offloading, words) == "min_offloaded_tensor_size=1"
    assert changes(rules.offloading, "--offload-modules core_attn") == ""


def test_vocabulary_and_schedule():
    """Padding stays possible; what decays gets its length."""
    assert changes(rules.vocabulary, "--make-vocab-size-divisible-by 3232") == (
        "make_vocab_size_divisible_by=128"
    )
    assert changes(rules.vocabulary, "--make-vocab-size-divisible-by 64") == ""
    assert changes(rules.schedule, "--lr-decay-style WSD") == (
        "train_iters=3, eval_iters=0, eval_interval=1000, lr=1e-3, lr_wsd_decay_iters=1"
    )


@pytest.mark.parametrize(
    ("rule", "text", "why"),
    [
        (rules.axes, PIPELINE, "first, middle and last stage"),
        (rules.axes, "--tensor-model-parallel-size 8", "an axis above 1 becomes 2"),
        (rules.schedule, "--eval-interval 7", "nothing is evaluated"),
        (rules.schedule, "", "Megatron needs one"),
    ],
)
def test_reasons(rule, text, why):
    """A reason fits the size that it explains, and what the command has is not needed."""
    made = rule(case(text))
    options = ("pipeline_model_parallel_size", "tensor_model_parallel_size", "eval_interval")
    assert [change.why for change in made if change.option in options] == [why]


def test_the_file_of_overlapped_communication_is_not_data():
    text = "--tensor-model-parallel-size 8 --tp-comm-overlap --tp-comm-overlap-cfg ub.yaml"
    assert changes(rules.axes, text) == "tensor_model_parallel_size=2, tp_comm_overlap_cfg"


def test_main_weights():
    """Those that a check refuses are lost, and said to be."""
    [lost] = rules.main_weights(case("--main-params-dtype fp16"))
    assert (lost.option, lost.values, lost.lost) == ("main_params_dtype", ("fp32",), True)
    assert changes(rules.main_weights, "--main-params-dtype fp32") == ""


def test_conversations():
    """Are kept where they can be read; else they are lost, and said to be."""
    large = case("--sft")
    assert list(rules.data(large)) == []
    [lost] = rules.data(dataclasses.replace(large, can_chat=False))
    assert (lost.option, lost.values, lost.lost) == ("sft", None, True)


def test_fill_in_the_middle():
    """Its tokens are the own data's; samples of mock data are not rearranged."""
    options = changes(rules.data, "--fim-data --fim-rate 0.1 --fim-split-sample x").split(", ")
    assert {"fim_rate=0.5", "fim_split_sample=10", "fim_eod_token=256"} <= {*options}
    assert "fim_data" not in options
    assert changes(rules.data, "--fim-data --mock-data") == "mock_data, fim_data"


def test_an_axis_that_is_left_out_takes_its_options_with_it():
    """Megatron refuses them without it."""
    text = (
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
        "--defer-embedding-wgrad-compute --num-layers 4"
    )
    assert changes(rules.axes, text, 8, ("pp", "dp")) == (
        "tensor_model_parallel_size=1, pipeline_model_parallel_size=2, "
        "sequence_parallel, defer_embedding_wgrad_compute"
    )
    assert changes(rules.axes, text, 8) == (
        "tensor_model_parallel_size=2, pipeline_model_parallel_size=2"
    )
