# SPDX-License-Identifier: Apache-2.0
"""Configurations of Megatron-Bridge become flags, and flags are set in them; without Bridge."""

import dataclasses
from types import SimpleNamespace

import torch

from megatron_ttrace.jobs.commands.command_line import Command
from megatron_ttrace.jobs.shrink import bridge as sizes
from megatron_ttrace.jobs.shrink import plan
from megatron_ttrace.jobs.shrink.command_flags import CommandFlags

MODEL = {
    "num_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_query_groups": 8,
    "num_moe_experts": 256,
    "moe_router_topk": 8,
    "moe_layer_freq": [0] * 3 + [1] * 58,
    "window_size": (4096, 0),
    "sequence_parallel": True,
    "seq_length": 4096,
    "vocab_size": 129280,
    "tensor_model_parallel_size": 4,
    "pipeline_model_parallel_size": 4,
    "virtual_pipeline_model_parallel_size": 2,
    "expert_model_parallel_size": 8,
    "expert_tensor_parallel_size": 1,
    "overlap_p2p_comm": True,
    "pipeline_model_parallel_layout": [
        ["embedding", *["decoder"] * 8],
        *[["decoder"] * 8] * 6,
        [*["decoder"] * 5, "mtp", "loss"],
    ],
    "mtp_num_layers": 1,
    "fp8": None,
    "params_dtype": None,
}
"""Fields of Bridge's providers."""


def section(**fields):
    """A section of a configuration: a dataclass with these fields."""
    return dataclasses.make_dataclass("Section", fields)(**fields)


def configuration(**fields):
    """Of a large mixture of experts."""
    precision = SimpleNamespace(fp8=None, num_layers_at_start_in_bf16=0)
    return SimpleNamespace(
        model=section(**{**MODEL, **fields}),
        train=section(global_batch_size=2048, micro_batch_size=1),
        dataset=section(seq_length=4096),
        mixed_precision=precision,
    )


def test_layouts_and_patterns_are_written_as_megatron_reads_them():
    """One word for a pattern over layers, letters for stages, a flag for what is on."""
    flags = CommandFlags.parse(sizes.words(configuration()))
    assert flags.text("pipeline_model_parallel_layout") == "|".join(
        ["E" + "t" * 8, *["t" * 8] * 6, "t" * 5 + "mL"]
    )
    assert flags.text("moe_layer_freq").startswith("[0,0,0,1,")
    assert flags.text("window_size") == "4096,0"
    assert flags.text("num_experts") == "256"
    assert flags.has("sequence_parallel")
    assert flags.has("group_query_attention")
    assert not flags.has("vocab_size")


def test_small_jobs_are_set_in_the_configuration():
    """Each axis becomes 2, and everything that has the name gets the value."""
    cfg = configuration()
    small = plan.shrink(Command("x.py", tuple(sizes.words(cfg)), ranks=1024))
    job = small.jobs[0]
    sizes.apply(cfg, job.arguments)
    model = cfg.model
    assert (model.tensor_model_parallel_size, model.pipeline_model_parallel_size) == (2, 2)
    assert model.expert_model_parallel_size == 2
    stages = model.pipeline_model_parallel_layout.split("|")
    assert len(stages) == 2 * model.virtual_pipeline_model_parallel_size == 4
    assert len(model.moe_layer_freq) == model.num_layers == sum(s.count("t") for s in stages)
    assert set(model.moe_layer_freq) == {0, 1}
    assert model.seq_length == cfg.dataset.seq_length == 64
    assert model.window_size == (15, 0)
    assert model.num_moe_experts == 6
    assert model.sequence_parallel is True
    assert cfg.train.global_batch_size < 64
    assert CommandFlags.parse(sizes.words(cfg)).text("num_layers") == str(model.num_layers)


def test_what_is_left_is_in_the_account():
    """Weights that are not loaded are named; nothing else of a checkpoint is a flag."""
    cfg = configuration()
    cfg.checkpoint = section(pretrained_checkpoint="/weights", load=None)
    flags = CommandFlags.parse(sizes.words(cfg))
    assert flags.text("pretrained_checkpoint") == "/weights"
    small = plan.of_flags(Command("x.py", tuple(sizes.words(cfg)), ranks=1024), 8)
    assert any(lost.startswith("--pretrained-checkpoint: the weights") for lost in small.lost)


def test_main_weights_become_wide():
    """A field that is a dtype is read and set; one of four bytes is no flag."""
    cfg = configuration()
    cfg.optimizer = section(main_params_dtype=torch.float16)
    words = tuple(sizes.words(cfg))
    assert CommandFlags.parse(words).text("main_params_dtype") == "fp16"
    sizes.apply(cfg, plan.of_flags(Command("x.py", words, ranks=1024), 8).jobs[0].arguments)
    assert cfg.optimizer.main_params_dtype is torch.float32
    assert not CommandFlags.parse(sizes.words(cfg)).has("main_params_dtype")


def test_what_belongs_to_a_dropped_axis_goes():
    """A job with the pipeline alone has no sequence parallelism, and the other way round."""
    cfg = configuration()
    command = Command("x.py", tuple(sizes.words(cfg)), ranks=1024)
    sizes.apply(cfg, plan.with_axes(command, ("pp",)).arguments)
    assert cfg.model.tensor_model_parallel_size == 1
    assert cfg.model.sequence_parallel is False
    cfg = configuration()
    sizes.apply(cfg, plan.with_axes(command, ("tp",)).arguments)
    assert cfg.model.pipeline_model_parallel_layout is None
    assert cfg.model.virtual_pipeline_model_parallel_size is None
    assert cfg.model.sequence_parallel is True


def test_interleaving_without_a_layout():
    """Chunks are kept, and a schedule that does not overlap needs three stages."""
    cfg = configuration(pipeline_model_parallel_layout=None, num_layers=64, overlap_p2p_comm=False)
    flags = CommandFlags.parse(sizes.words(cfg))
    assert flags.text("num_virtual_stages_per_pipeline_rank") == "2"
    small = plan.shrink(Command("x.py", tuple(sizes.words(cfg)), ranks=16), 16)
    sizes.apply(cfg, small.jobs[0].arguments)
    assert cfg.model.virtual_pipeline_model_parallel_size == 2
    assert cfg.model.overlap_p2p_comm is False
    assert cfg.model.num_layers % (2 * cfg.model.pipeline_model_parallel_size) == 0
