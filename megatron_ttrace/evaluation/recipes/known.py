# SPDX-License-Identifier: Apache-2.0
"""Which configurations use what docs/findings.md proves to be faulty in Megatron.

A configuration is named by what it combines, never by its name. This only labels a divergence in a
table; it changes no verdict.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence

from megatron_ttrace.mcore.shrink.given import Given


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """A fault of Megatron's.

    Attributes:
        heading: the beginning of its heading in docs/findings.md, without the number.
        has: whether a job has what it takes.
        fixed: the series of Megatron that does not have it any more.
    """

    heading: str
    has: Callable[[Given], bool]
    fixed: tuple[int, ...] = ()


def _above_one(given: Given, axis: str) -> bool:
    return given.integer(f"{axis}_parallel_size", 1) > 1


FINDINGS = (
    Finding(
        "MLA without sequence parallelism",
        lambda given: (
            given.has("multi_latent_attention")
            and _above_one(given, "tensor_model")
            and not given.has("sequence_parallel")
        ),
    ),
    Finding(
        "Loss masks and CP",
        lambda given: (
            given.has("eod_mask_loss")
            and _above_one(given, "context")
            and not given.has("calculate_per_token_loss")
        ),
    ),
    Finding(
        "MTP and CP",
        lambda given: given.integer("mtp_num_layers") > 0 and _above_one(given, "context"),
    ),
    Finding(
        "Attention sinks and TP",
        lambda given: (
            given.text("softmax_type") == "learnable" and _above_one(given, "tensor_model")
        ),
    ),
    Finding(
        "A tied head that is never used",
        lambda given: (
            given.integer("mtp_num_layers") > 0
            and _above_one(given, "pipeline_model")
            and not given.has("untie_embeddings_and_output_weights")
            and (given.has("log_num_zeros_in_grad") or given.has("log_params_norm"))
        ),
    ),
    Finding(
        "Several instances of the distributed optimizer",
        lambda given: (
            given.integer("num_distributed_optimizer_instances", 1) > 1
            and given.has("log_params_norm")
        ),
    ),
    Finding(
        "Megatron-FSDP and TP: the number of zeros",
        lambda given: (
            given.has("use_megatron_fsdp")
            and _above_one(given, "tensor_model")
            and given.has("log_num_zeros_in_grad")
        ),
    ),
    Finding(
        "Sparse attention's indexer under context parallelism",
        lambda given: (
            given.text("experimental_attention_variant") == "dsa" and _above_one(given, "context")
        ),
    ),
    Finding(
        "Gated delta nets: all tensor-parallel ranks start with the same convolution",
        lambda given: (
            given.text("experimental_attention_variant") == "gated_delta_net"
            and _above_one(given, "tensor_model")
        ),
    ),
    Finding(
        "Megatron-FSDP and per-token losses",
        lambda given: (
            given.has("use_megatron_fsdp")
            and given.has("calculate_per_token_loss")
            and given.has("bf16")
            and given.text("megatron_fsdp_main_grads_dtype") != "fp32"
            and given.has("sequence_parallel")
            and _above_one(given, "tensor_model")
        ),
    ),
    Finding(
        "torch FSDP2 and per-token losses",
        lambda given: given.has("use_torch_fsdp2") and given.has("calculate_per_token_loss"),
    ),
    Finding(
        "Megatron-FSDP and experts without copies",
        lambda given: (
            given.has("use_megatron_fsdp")
            and given.text("data_parallel_sharding_strategy").startswith("optim_grads")
            and not given.has("calculate_per_token_loss")
            and _above_one(given, "expert_model")
        ),
    ),
    Finding(
        "Megatron-FSDP on the meta device",
        lambda given: (
            given.has("use_megatron_fsdp")
            and given.has("init_model_with_meta_device")
            and given.has("moe_router_enable_expert_bias")
        ),
    ),
    Finding(
        "`--use-cpu-initialization` with expert parallelism",
        lambda given: given.has("use_cpu_initialization") and _above_one(given, "expert_model"),
    ),
    Finding(
        "`--outer-dp-sharding-strategy optim`",
        lambda given: (
            given.has("use_megatron_fsdp")
            and given.text("outer_dp_sharding_strategy") == "optim"
            and given.integer("num_distributed_optimizer_instances", 1) > 1
        ),
    ),
    Finding(
        "Megatron-FSDP in several instances",
        lambda given: (
            given.has("use_megatron_fsdp")
            and given.integer("num_distributed_optimizer_instances", 1) > 1
            and not given.has("overlap_grad_reduce")
        ),
    ),
    Finding(
        "Global auxiliary loss",
        lambda given: given.text("moe_router_load_balancing_type") == "global_aux_loss",
    ),
    Finding(
        "Megatron-FSDP and `--clip-grad 0`",
        lambda given: given.has("use_megatron_fsdp") and given.text("clip_grad") in ("0", "0.0"),
    ),
    Finding(
        "`--optimizer adaptive_muon` and TP",
        lambda given: (
            given.text("optimizer") == "adaptive_muon" and _above_one(given, "tensor_model")
        ),
    ),
    Finding(
        "Muon, and fewer query groups than TP ranks",
        lambda given: (
            given.text("optimizer") == "muon"
            and given.has("group_query_attention")
            and given.integer("tensor_model_parallel_size", 1)
            > given.integer("num_query_groups", 1)
        ),
    ),
    Finding(
        "Grouped experts with TP",
        lambda given: given.has("moe_grouped_gemm") and _above_one(given, "tensor_model"),
        fixed=(0, 19),
    ),
)


def finding_of(arguments: Sequence[str], megatron: str) -> str:
    """The heading of the finding that a diverging job may show; empty if it is a new one.

    Args:
        arguments: of the job.
        megatron: the version of its Megatron.
    """
    given = Given.parse(arguments)
    series = tuple(int(part) for part in re.findall(r"\d+", megatron)[:2])
    for finding in FINDINGS:
        if finding.has(given) and not (finding.fixed and series >= finding.fixed):
            return finding.heading
    return ""
