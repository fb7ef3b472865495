# SPDX-License-Identifier: Apache-2.0
"""The matrix as data: layouts x models x dtypes.

Models are small, so that a check costs seconds; their shapes are awkward on purpose (heads, groups
and layers of different numbers), so that a transposed or miscounted dim does not fit by luck.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable, Sequence

COMMON = (
    "--hidden-size 64 --num-attention-heads 8 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 3 --lr 1e-3 --lr-warmup-iters 0 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 128 --eval-iters 0 "
    "--attention-dropout 0 --hidden-dropout 0"
)

MODELS = {
    "gpt": "--num-layers 2 --transformer-impl local",
    "llama": (
        "--num-layers 2 --transformer-impl local --normalization RMSNorm --swiglu "
        "--group-query-attention --num-query-groups 4 --position-embedding-type rope "
        "--untie-embeddings-and-output-weights --disable-bias-linear"
    ),
}
MODELS |= {
    f"{name}-te": words.replace("--transformer-impl local", "--transformer-impl transformer_engine")
    for name, words in MODELS.items()
}
"""GPT-2-like (LayerNorm, GELU, learned positions, tied embeddings, biases) and Llama-like, with
Megatron's local layers and with TransformerEngine's (emulated where there is no GPU)."""

EXPERTS = (
    "--disable-bias-linear --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 "
    "--moe-ffn-hidden-size 96"
)
MODELS |= {
    "moe": f"{MODELS['llama']} {EXPERTS}",
    "moe-te": f"{MODELS['llama-te']} {EXPERTS} --moe-grouped-gemm",
    "moe-deep": (
        f"{MODELS['llama-te']} {EXPERTS} --moe-grouped-gemm --moe-router-score-function sigmoid "
        "--moe-router-enable-expert-bias --moe-router-num-groups 2 --moe-router-group-topk 1 "
        "--moe-router-load-balancing-type seq_aux_loss --moe-shared-expert-intermediate-size 64 "
        "--moe-router-topk-scaling-factor 2.5 --moe-z-loss-coeff 1e-3 --qk-layernorm"
    ),
}
"""Mixtures of experts: Mixtral-like with sequential and with grouped experts, and one with what
DeepSeek-like models add to it."""

DTYPES = {"fp32": "", "bf16": "--bf16"}


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a job is spread.

    Attributes:
        name: what people call it.
        nproc: number of ranks.
        arguments: Megatron's.
        models: which models can run it.
    """

    name: str
    nproc: int
    arguments: str
    models: tuple[str, ...] = ("gpt", "llama")


TP2 = "--tensor-model-parallel-size 2"
SP = "--sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
ZERO = "--use-distributed-optimizer"
CP2 = "--context-parallel-size 2"
TE = ("gpt-te", "llama-te")
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"

EP2 = "--expert-model-parallel-size 2"
ETP1 = "--expert-tensor-parallel-size 1"
ALLTOALL = "--moe-token-dispatcher-type alltoall"
MOE = ("moe", "moe-te", "moe-deep")
GROUPED = ("moe-te", "moe-deep")

LAYOUTS = (
    Layout("single", 1, ""),
    Layout("tp2", 2, TP2),
    Layout("tp2-sp", 2, f"{TP2} {SP}", ("gpt",)),
    Layout("tp4", 4, "--tensor-model-parallel-size 4"),
    Layout("pp2", 2, PP2),
    Layout("pp4", 4, "--pipeline-model-parallel-size 4 --num-layers 4"),
    Layout("pp2-vpp2", 2, f"{PP2} --num-layers 4 --num-virtual-stages-per-pipeline-rank 2"),
    Layout("dp2", 2, ""),
    Layout("dp4", 4, ""),
    Layout("dp2-zero", 2, ZERO),
    Layout("dp2-zero-overlap", 2, f"{ZERO} {OVERLAP}"),
    Layout("dp4-zero", 4, ZERO),
    Layout("dp2-overlap", 2, "--overlap-grad-reduce"),
    Layout("tp2-pp2", 4, f"{TP2} {PP2}"),
    Layout("tp2-dp2", 4, TP2),
    Layout("tp2-sp-dp2", 4, f"{TP2} {SP}", ("gpt",)),
    Layout("tp2-dp2-zero", 4, f"{TP2} {ZERO}"),
    Layout("tp2-sp-pp2-zero", 4, f"{TP2} {SP} {PP2} {ZERO}", ("gpt",)),
    Layout("pp2-dp2-zero", 4, f"{PP2} {ZERO}"),
    Layout("pp2-dp2-zero-overlap", 4, f"{PP2} {ZERO} {OVERLAP}"),
    Layout(
        "recompute-uniform",
        2,
        f"{TP2} --num-layers 4 --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 2",
    ),
    Layout(
        "recompute-block",
        2,
        f"{TP2} --num-layers 4 --recompute-granularity full --recompute-method block "
        "--recompute-num-layers 1",
    ),
    Layout("recompute-selective", 2, f"{TP2} --recompute-granularity selective"),
    Layout("per-token-loss", 2, "--calculate-per-token-loss"),
    Layout("te-tp2-sp", 2, f"{TP2} {SP}", TE),
    Layout("te-pp2", 2, PP2, TE),
    Layout("te-dp2-zero", 2, ZERO, TE),
    Layout("cp2", 2, CP2, TE),
    Layout("cp2-all-gather", 2, f"{CP2} --cp-comm-type all_gather", TE),
    Layout("cp2-a2a", 2, f"{CP2} --cp-comm-type a2a", TE),
    Layout("tp2-sp-cp2", 4, f"{TP2} {SP} {CP2}", TE),
    Layout("pp2-cp2", 4, f"{PP2} {CP2}", TE),
    Layout("ep2", 2, EP2, MOE),
    Layout("ep2-alltoall", 2, f"{EP2} {ALLTOALL}", MOE),
    Layout("ep4-alltoall-zero", 4, f"--expert-model-parallel-size 4 {ALLTOALL} {ZERO}", GROUPED),
    Layout("ep2-edp2-zero", 4, f"{EP2} {ZERO} {OVERLAP}", ("moe-te",)),
    Layout("moe-dp2", 2, "", ("moe",)),
    Layout("tp2-sp-etp2", 2, f"{TP2} {SP}", GROUPED),
    Layout("tp2-sp-etp2-alltoall", 2, f"{TP2} {SP} {ALLTOALL}", GROUPED),
    Layout("tp2-sp-ep2", 2, f"{TP2} {SP} {EP2} {ETP1} {ALLTOALL}", GROUPED),
    Layout("tp2-sp-ep2-etp2", 4, f"{TP2} {SP} {EP2}", GROUPED),
    Layout("tp2-sp-ep2-etp2-alltoall", 4, f"{TP2} {SP} {EP2} {ALLTOALL}", ("moe-te",)),
    Layout("tp2-sp-ep4", 4, f"{TP2} {SP} --expert-model-parallel-size 4 {ETP1}", ("moe-te",)),
    Layout("pp2-ep2", 4, f"{PP2} {EP2} {ALLTOALL}", ("moe", "moe-deep")),
    Layout(
        "pp2-vpp2-ep2",
        4,
        f"{PP2} {EP2} --num-layers 4 --num-virtual-stages-per-pipeline-rank 2",
        ("moe-te",),
    ),
    Layout("cp2-ep2", 2, f"{CP2} {EP2}", GROUPED),
    Layout("cp2-ep2-alltoall", 4, f"{CP2} {EP2} {ALLTOALL} {ZERO}", ("moe-te",)),
    Layout(
        "ep2-recompute",
        2,
        f"{EP2} {ALLTOALL} --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
        GROUPED,
    ),
    Layout(
        "ep2-recompute-moe",
        2,
        f"{EP2} {ALLTOALL} --recompute-granularity selective --recompute-modules moe",
        ("moe-te",),
    ),
    Layout(
        "ep2-shared-overlap",
        2,
        f"{EP2} {ALLTOALL} --moe-shared-expert-overlap",
        ("moe-deep",),
    ),
    Layout("tp2-sp-pp2-ep2", 8, f"{TP2} {SP} {PP2} {EP2} {ETP1} {ALLTOALL}", ("moe-te",)),
    Layout("mtp-tp2", 2, f"{TP2} --mtp-num-layers 1", ("llama-te",)),
)


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One healthy job."""

    name: str
    nproc: int
    arguments: tuple[str, ...]


def configurations() -> list[Configuration]:
    """All of them; names are ``layout/model/dtype``."""
    return [
        Configuration(
            f"{layout.name}/{model}/{dtype}",
            layout.nproc,
            tuple(f"{COMMON} {MODELS[model]} {layout.arguments} {DTYPES[dtype]}".split()),
        )
        for layout in LAYOUTS
        for model in layout.models
        for dtype in DTYPES
    ]


def select(everything: Iterable[Configuration], patterns: Sequence[str]) -> list[Configuration]:
    """Those whose name fits any of the shell patterns (``*`` also crosses the slashes)."""
    return [
        one
        for one in everything
        if not patterns or any(fnmatch.fnmatch(one.name, pattern) for pattern in patterns)
    ]
