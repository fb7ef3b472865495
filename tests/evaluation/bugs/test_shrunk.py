# SPDX-License-Identifier: Apache-2.0
"""A known bug in a large configuration is still there when the configuration is shrunk."""

import math

import pytest

from megatron_ttrace.evaluation.bugs import catalogue
from megatron_ttrace.evaluation.bugs.suite import MODELS
from megatron_ttrace.jobs.commands.command_line import Command
from megatron_ttrace.jobs.shrink import axes, plan
from megatron_ttrace.jobs.shrink.command_flags import CommandFlags

BUGS = catalogue.load_catalogue()
LARGE = {
    "tensor_model_parallel_size": 8,
    "pipeline_model_parallel_size": 8,
    "context_parallel_size": 4,
    "expert_model_parallel_size": 16,
    "num_experts": 64,
    "moe_router_topk": 8,
    "num_layers": 96,
    "hidden_size": 12288,
    "num_attention_heads": 96,
    "seq_length": 8192,
    "max_position_embeddings": 8192,
    "recompute_num_layers": 4,
    "num_query_groups": 8,
    "micro_batch_size": 1,
    "global_batch_size": 1536,
}
"""What a large job has where a job of the catalogue has something smaller."""
SIZES = {*LARGE, "train_iters", "eval_iters", "tokenizer_type", "vocab_size", "lr_warmup_iters"}


def large_job(layout, model):
    """The layout's flags at production sizes: TP 8, PP 8, CP 4, EP 16, and DP 16."""
    words = [*MODELS[model].split(), *layout.arguments]
    arguments = {}
    for flag in CommandFlags.parse(words).flags:
        values = flag.values
        if flag.option in LARGE:
            values = (str(LARGE[flag.option]),)
        arguments[flag.option] = [flag.name, *values]
    if layout.healthy:
        # Layers that do not divide, which only a faulty Megatron accepts.
        arguments["num_layers"] = ["--num-layers", "95"]
    words = [word for flag in arguments.values() for word in flag]
    large = axes.of_large(CommandFlags.parse(words), None)
    ranks = math.lcm(large.tp * large.cp * 16, large.ep * large.etp) * large.pp
    return Command("pretrain_gpt.py", tuple(words), {}, ranks if layout.nproc > 1 else 1)


CASES = [
    pytest.param(layout, model, id=f"{bug.id}-{number}-{model}")
    for bug in BUGS
    for number, layout in enumerate(bug.layouts)
    for model in layout.models
]


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_everything_that_the_bug_needs_is_kept(layout, model):
    """Every flag of the catalogue's job, and every axis along which it is spread."""
    shrunk = plan.shrink(large_job(layout, model))
    small = axes.of_large(
        CommandFlags.parse([*MODELS[model].split(), *layout.arguments]), layout.nproc
    )
    wanted = set(small.spread())
    holding = [job for job in shrunk.jobs if wanted <= set(job.axes.spread())]
    assert holding, f"no job has all of {wanted}"
    for job in holding:
        kept = CommandFlags.parse(job.arguments)
        for flag in CommandFlags.parse(layout.arguments).flags:
            assert kept.has(flag.option), flag.name
            if flag.option not in SIZES:
                assert kept.text(flag.option) == " ".join(flag.values)
        if layout.healthy:
            assert kept.integer("num_layers") % job.axes.pp
