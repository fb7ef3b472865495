# SPDX-License-Identifier: Apache-2.0
"""The matrix as data: layouts x models x dtypes.

Models are small, so that a check costs seconds; their shapes are awkward on purpose (heads, groups
and layers of different numbers), so that a transposed or miscounted dim does not fit by luck.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable, Sequence
from pathlib import Path

COMMON = (
    "--hidden-size 64 --num-attention-heads 8 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 3 --lr 1e-3 --lr-warmup-iters 0 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 128 --eval-iters 0 "
    "--attention-dropout 0 --hidden-dropout 0"
)
VOCABULARY = 128

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
MODELS["mla-te"] = (
    "--num-layers 2 --transformer-impl transformer_engine --normalization RMSNorm --swiglu "
    "--untie-embeddings-and-output-weights --disable-bias-linear --multi-latent-attention "
    "--q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8 "
    "--qk-layernorm"
)
MODELS["mla-q-te"] = (
    MODELS["mla-te"].replace("--q-lora-rank 24 ", "").replace(" --qk-layernorm", "")
)
"""DeepSeek-like: multi-head latent attention, with queries compressed or not."""
MODELS["dsa-te"] = (
    f"{MODELS['mla-te']} --experimental-attention-variant dsa --dsa-indexer-n-heads 4 "
    "--dsa-indexer-head-dim 16 --dsa-indexer-topk 32 --dsa-indexer-loss-coeff 0.1 "
    "--no-dsa-indexer-rotate-activation"
)
"""Sparse attention: an indexer beside the attention chooses which tokens are seen; here all are.
Its rotation is a CUDA kernel."""

MODELS["gdn-te"] = (
    f"{MODELS['llama-te']} --experimental-attention-variant gated_delta_net "
    "--linear-attention-freq 2 --linear-key-head-dim 8 --linear-value-head-dim 8 "
    "--linear-num-key-heads 4 --linear-num-value-heads 8"
)
"""Qwen3-Next-like: a gated delta net in the first layer, attention in the second."""

_HYBRID = (
    "--transformer-impl transformer_engine --normalization RMSNorm --swiglu "
    "--group-query-attention --num-query-groups 4 --position-embedding-type none "
    "--untie-embeddings-and-output-weights --disable-bias-linear "
    "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec "
    "--mamba-num-heads 8 --mamba-head-dim 16 --mamba-state-dim 8 --mamba-num-groups 2"
)
MODELS["hybrid"] = f"{_HYBRID} --hybrid-layer-pattern M-M*"
MODELS["hybrid-moe"] = (
    f"{_HYBRID} --hybrid-layer-pattern M*ME --num-experts 4 --moe-router-topk 2 "
    "--moe-grouped-gemm --moe-ffn-hidden-size 96 --moe-aux-loss-coeff 1e-2"
)
"""Mamba, attention and MLP or expert layers."""

SCRIPTS = {"hybrid": "pretrain_hybrid.py", "hybrid-moe": "pretrain_hybrid.py"}
"""Scripts of ``launch/`` that train a model; ``pretrain_gpt.py`` trains all others."""

DTYPES = {"fp32": "", "bf16": "--bf16"}
WIDE = tuple(DTYPES)
FP16 = {"fp16": "--fp16"}
"""With a loss scale."""
DTYPES |= FP16 | {
    "fp8-delayed": "--bf16 --fp8-format hybrid --fp8-recipe delayed",
    "fp8-tensorwise": "--bf16 --fp8-format hybrid --fp8-recipe tensorwise",
    "fp8-blockwise": "--bf16 --fp8-format e4m3 --fp8-recipe blockwise",
}
FP8 = tuple(name for name in DTYPES if name.startswith("fp8"))
"""With TransformerEngine's layers only."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a job is spread.

    Attributes:
        name: what people call it.
        nproc: number of ranks.
        arguments: Megatron's.
        models: which models can run it.
        data: ``mock``, or ``documents``: of very uneven length (evaluation/matrix/documents.py).
        finding: heading in docs/findings.md of the proven fault of Megatron's for which it
            diverges; empty for a healthy one.
        dtypes: of :data:`DTYPES`.
    """

    name: str
    nproc: int
    arguments: str
    models: tuple[str, ...] = ("gpt", "llama")
    data: str = "mock"
    finding: str = ""
    dtypes: tuple[str, ...] = WIDE


TP2 = "--tensor-model-parallel-size 2"
SP = "--sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
ZERO = "--use-distributed-optimizer"
FSDP = "--use-megatron-fsdp --ckpt-format fsdp_dtensor --data-parallel-sharding-strategy"
CP2 = "--context-parallel-size 2"
TE = ("gpt-te", "llama-te")
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
EOD = "--eod-mask-loss"
RESET = "--reset-position-ids --reset-attention-mask"
SINKS = "--softmax-type learnable"
NORMALISED = "--calculate-per-token-loss"
MTP = "--mtp-num-layers 1"
ROPE = "--position-embedding-type rope"
A2A = "--cp-comm-type a2a"
MLA = ("mla-te",)
DSA = ("dsa-te",)

SINKHORN = "--moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0"
QUANTILE = "--moe-router-load-balancing-type quantile_balancing --moe-aux-loss-coeff 0"
CAPACITY = "--moe-expert-capacity-factor 1.0"
RECOMPUTE = "--recompute-granularity selective --recompute-modules"
HIERARCHICAL = "--context-parallel-size 4 --hierarchical-context-parallel-sizes 2 2"
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
    Layout("tp2-cpu-initialization", 2, f"{TP2} --use-cpu-initialization", dtypes=("fp32",)),
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
        "pp2-vpp2-dp2-zero-step",
        4,
        f"{PP2} --num-layers 4 --num-virtual-stages-per-pipeline-rank 2 {ZERO} {OVERLAP} "
        "--overlap-param-gather-with-optimizer-step --ckpt-format torch",
        ("gpt",),
    ),
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
    Layout(
        "ep2-cpu-initialization",
        2,
        f"{EP2} --use-cpu-initialization",
        ("moe",),
        finding="`--use-cpu-initialization` with expert parallelism",
        dtypes=("fp32",),
    ),
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
    Layout("dp2-fsdp-zero1", 2, f"{FSDP} optim", ("gpt-te",)),
    Layout("dp2-fsdp-zero2", 2, f"{FSDP} optim_grads", TE),
    Layout("dp2-fsdp-zero3", 2, f"{FSDP} optim_grads_params", TE),
    Layout("dp4-fsdp-zero3-overlap", 4, f"{FSDP} optim_grads_params {OVERLAP}", ("llama-te",)),
    Layout("tp2-sp-dp2-fsdp-zero3", 4, f"{TP2} {SP} {FSDP} optim_grads_params", ("llama-te",)),
    Layout("cp2-fsdp-zero3", 2, f"{CP2} {FSDP} optim_grads_params", ("llama-te",)),
    Layout("cp2-dp2", 4, CP2, ("llama-te",)),
    Layout("cp2-zero-overlap", 2, f"{CP2} {ZERO} {OVERLAP}", ("llama-te",)),
    Layout("cp2-dp2-zero-overlap", 4, f"{CP2} {ZERO} {OVERLAP}", ("llama-te",)),
    Layout("tp2-sp-pp2-cp2", 8, f"{TP2} {SP} {PP2} {CP2}", ("llama-te",)),
    Layout(
        "tp2-sp-pp2-cp2-zero-overlap",
        8,
        f"{TP2} {SP} {PP2} {CP2} {ZERO} {OVERLAP}",
        ("llama-te",),
    ),
    Layout("tp2-sp", 2, f"{TP2} {SP}", ("mla-te", "mla-q-te")),
    Layout("pp2", 2, PP2, MLA),
    Layout("cp2", 2, CP2, MLA),
    Layout("tp2-sp-cp2", 4, f"{TP2} {SP} {CP2}", MLA),
    Layout("tp2", 2, TP2, ("mla-te", "mla-q-te"), finding="MLA without sequence parallelism"),
    Layout("tp2-sp", 2, f"{TP2} {SP}", DSA, dtypes=("fp32",)),
    Layout("tp2-sp-top8", 2, f"{TP2} {SP} --dsa-indexer-topk 8", DSA, dtypes=("fp32",)),
    Layout("pp2", 2, PP2, DSA, dtypes=("fp32",)),
    Layout(
        "cp2-all-gather",
        2,
        f"{CP2} --cp-comm-type allgather",
        DSA,
        finding="Sparse attention's indexer under context parallelism",
    ),
    Layout("tp2-sp-dp2-zero", 4, f"{TP2} {SP} {ZERO}", DSA, dtypes=("fp32",)),
    Layout("tp2-sp-pp2", 4, f"{TP2} {SP} {PP2}", DSA, dtypes=("fp32",)),
    Layout("sinks-tp2", 2, f"{TP2} {SINKS} --clip-grad 0", ("gpt", "llama-te")),
    Layout("sinks-tp2-sp", 2, f"{TP2} {SP} {SINKS} --clip-grad 0", ("gpt", "llama-te")),
    Layout("sinks-pp2", 2, f"{PP2} {SINKS}", ("gpt", "llama-te")),
    Layout("sinks-cp2-a2a", 2, f"{CP2} {A2A} {SINKS}", ("gpt-te", "llama-te")),
    Layout("qk-norm-tp2", 2, f"{TP2} --qk-layernorm", ("gpt", "llama-te")),
    Layout("qk-norm-tp2-sp", 2, f"{TP2} {SP} --qk-layernorm", ("gpt", "llama-te")),
    Layout("qk-norm-cp2", 2, f"{CP2} --qk-layernorm", ("llama-te",)),
    Layout("window-tp2", 2, f"{TP2} --window-size 7,0", ("gpt", "llama-te")),
    Layout(
        "window-alternating-pp2",
        2,
        f"{PP2} --window-size 7,0 --window-attn-skip-freq 2",
        ("llama-te",),
    ),
    Layout("window-cp2-a2a", 2, f"{CP2} {A2A} --window-size 7,0", ("llama-te",)),
    Layout(
        "window-cp2-all-gather",
        2,
        f"{CP2} --cp-comm-type all_gather --window-size 7,0",
        ("llama-te",),
    ),
    Layout("eod-dp2", 2, EOD, ("gpt",), "documents"),
    Layout("eod-pp2", 2, f"{PP2} {EOD}", ("gpt",), "documents"),
    Layout("eod-cp2", 2, f"{CP2} {EOD}", ("llama-te",), "documents", "masks and CP"),
    Layout("eod-per-token-dp2", 2, f"{EOD} {NORMALISED}", ("gpt",), "documents"),
    Layout("eod-per-token-pp2", 2, f"{PP2} {EOD} {NORMALISED}", ("gpt",), "documents"),
    Layout("eod-per-token-cp2", 2, f"{CP2} {EOD} {NORMALISED}", TE, "documents"),
    Layout(
        "eod-per-token-tp2-sp-cp2",
        4,
        f"{TP2} {SP} {CP2} {EOD} {NORMALISED}",
        ("llama-te",),
        "documents",
    ),
    Layout("eod-per-token-cp2-dp2", 4, f"{CP2} {EOD} {NORMALISED}", ("llama-te",), "documents"),
    Layout("reset-tp2", 2, f"{TP2} {RESET} {EOD}", ("gpt",), "documents"),
    Layout("reset-dp2", 2, f"{RESET} {EOD}", ("gpt",), "documents"),
    Layout("reset-pp2", 2, f"{PP2} {RESET} {EOD}", ("gpt",), "documents"),
    Layout("reset-tp2-sp", 2, f"{TP2} {SP} {RESET} {EOD}", ("gpt-te",), "documents"),
    Layout("clip-tp2-dp2-zero", 4, f"{TP2} {ZERO} --clip-grad 0.01", ("gpt",)),
    Layout("clip-pp2", 2, f"{PP2} --clip-grad 0.01", ("gpt",)),
    Layout(
        "decoupled-lr-tp2-pp2",
        4,
        f"{TP2} {PP2} --decoupled-lr 5e-4 --weight-decay 0.1",
        ("gpt",),
    ),
    Layout(
        "decoupled-lr-dp2-zero",
        2,
        f"{ZERO} --decoupled-lr 5e-4 --weight-decay 0.1",
        ("gpt",),
    ),
    Layout("untied-tp2", 2, f"{TP2} --untie-embeddings-and-output-weights", ("gpt",)),
    Layout("mtp-tp2", 2, f"{TP2} {MTP}", ("llama-te",)),
    Layout("mtp-pp2", 2, f"{PP2} {MTP}", ("llama-te",)),
    Layout("mtp-tied-pp2", 2, f"{PP2} {MTP} {ROPE}", ("gpt-te",)),
    Layout(
        "mtp-pp2-vpp2",
        2,
        f"{PP2} --num-layers 4 --num-virtual-stages-per-pipeline-rank 2 {MTP}",
        ("llama-te",),
    ),
    Layout("mtp-tp2-sp-pp2", 4, f"{TP2} {SP} {PP2} {MTP}", ("llama-te",)),
    Layout("mtp-cp2", 2, f"{CP2} {MTP}", ("llama-te",), finding="MTP and CP"),
    Layout("tp2", 2, TP2, ("gpt-te",), dtypes=FP8),
    Layout("tp2-sp", 2, f"{TP2} {SP}", TE, dtypes=FP8),
    Layout("pp2", 2, PP2, ("gpt-te",), dtypes=FP8),
    Layout("dp2-zero", 2, ZERO, ("gpt-te",), dtypes=FP8),
    Layout("cp2", 2, CP2, TE, dtypes=FP8),
    Layout("tp2-sp-cp2", 4, f"{TP2} {SP} {CP2}", ("llama-te",), dtypes=FP8),
    Layout("tp2-sp-pp2-zero", 4, f"{TP2} {SP} {PP2} {ZERO}", ("gpt-te",), dtypes=FP8),
    Layout("ep2", 2, EP2, ("moe-te",), dtypes=FP8),
    Layout("tp2-sp-ep2", 2, f"{TP2} {SP} {EP2} {ETP1} {ALLTOALL}", ("moe-te",), dtypes=FP8),
    Layout("tp2-sp-etp2", 2, f"{TP2} {SP}", ("moe-te",), dtypes=FP8),
    Layout("dp2-zero-fp8-weights", 2, f"{ZERO} --fp8-param-gather", ("gpt-te",), dtypes=FP8[:1]),
    Layout("tp2", 2, TP2, ("gpt-te",), dtypes=("fp16",)),
    Layout("dp4-zero-overlap", 4, f"{ZERO} {OVERLAP}", ("llama-te",), dtypes=("fp16",)),
    Layout("pp2-constant-scale", 2, f"{PP2} --loss-scale 1024", ("gpt",), dtypes=("fp16",)),
    Layout("tp2-sp", 2, f"{TP2} {SP}", ("moe-te",), dtypes=("fp16",)),
    Layout("sinkhorn-tp2-sp", 2, f"{TP2} {SP} {SINKHORN}", ("moe-te",)),
    Layout("sinkhorn-cp2", 2, f"{CP2} {SINKHORN} --moe-router-topk 1", ("moe-te",)),
    Layout("sinkhorn-pp2-ep2", 4, f"{PP2} {EP2} {ALLTOALL} {SINKHORN}", ("moe-te",)),
    Layout("capacity-tp2-sp", 2, f"{TP2} {SP} {CAPACITY}", ("moe-te",)),
    Layout("capacity-ep2", 2, f"{EP2} {ALLTOALL} {CAPACITY}", ("moe-te",)),
    Layout(
        "capacity-padded-ep2",
        2,
        f"{EP2} {ALLTOALL} {CAPACITY} --moe-pad-expert-input-to-capacity",
        ("moe-te",),
    ),
    Layout("quantile-tp2-sp", 2, f"{TP2} {SP} {QUANTILE}", ("moe-te",), dtypes=("fp32",)),
    Layout("fused-router-tp2-sp", 2, f"{TP2} {SP} --moe-router-fusion", GROUPED),
    Layout("tp2", 2, TP2, ("hybrid",)),
    Layout("tp2-sp", 2, f"{TP2} {SP}", ("hybrid",)),
    Layout("cp2", 2, CP2, ("hybrid",)),
    Layout("pp2-piped", 2, f"{PP2} --hybrid-layer-pattern M-|M*", ("hybrid",)),
    Layout("pp2-vpp2-piped", 2, f"{PP2} --hybrid-layer-pattern M|-|M|*", ("hybrid",)),
    Layout("tp2-sp-cp2-zero", 4, f"{TP2} {SP} {CP2} {ZERO}", ("hybrid",)),
    Layout("ep2", 2, EP2, ("hybrid-moe",)),
    Layout("tp2-sp-ep2", 2, f"{TP2} {SP} {EP2} {ETP1} {ALLTOALL}", ("hybrid-moe",)),
    Layout("pp2", 2, PP2, ("gdn-te",)),
    Layout("cp2", 2, CP2, ("gdn-te",)),
    Layout("tp2-sp", 2, f"{TP2} {SP}", ("gdn-te",), finding="start with the same convolution"),
    Layout("tp2", 2, TP2, ("gdn-te",), finding="gradients of a norm are never summed"),
    Layout("recompute-mlp-tp2", 2, f"{TP2} {RECOMPUTE} mlp", ("llama-te",), dtypes=("fp32",)),
    Layout(
        "dp2-fsdp-zero3-recompute",
        2,
        f"{FSDP} optim_grads_params {RECOMPUTE} layernorm mlp core_attn",
        ("llama-te",),
        dtypes=("fp32",),
    ),
    Layout(
        "dp2-fsdp-zero3-meta",
        2,
        f"{FSDP} optim_grads_params --init-model-with-meta-device",
        ("llama-te",),
        dtypes=("fp32",),
    ),
    Layout("defer-pp2", 2, f"{PP2} --defer-embedding-wgrad-compute", ("gpt-te",)),
    Layout("cp4-hierarchical", 4, f"{HIERARCHICAL} --cp-comm-type a2a+p2p", ("llama-te",)),
)


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One job; what the fields mean says :class:`Layout`."""

    name: str
    nproc: int
    arguments: tuple[str, ...]
    data: str = "mock"
    finding: str = ""
    script: str = "pretrain_gpt.py"


def configurations() -> list[Configuration]:
    """All of them; names are ``layout/model/dtype``."""
    return [
        Configuration(
            f"{layout.name}/{model}/{dtype}",
            layout.nproc,
            tuple(f"{COMMON} {MODELS[model]} {layout.arguments} {DTYPES[dtype]}".split()),
            layout.data,
            layout.finding,
            SCRIPTS.get(model, "pretrain_gpt.py"),
        )
        for layout in LAYOUTS
        for model in layout.models
        for dtype in layout.dtypes
    ]


def arguments_of(one: Configuration, directory: Path) -> tuple[str, ...]:
    """A configuration's whole command line; its data set is written below ``directory``."""
    if one.data == "mock":
        return one.arguments
    from megatron_ttrace.evaluation.matrix.documents import uneven_documents

    prefix = uneven_documents((directory / "data" / one.data).resolve(), VOCABULARY)
    words = [word for word in one.arguments if word != "--mock-data"]
    return (*words, "--data-path", str(prefix), "--split", "100,0,0")


def select(everything: Iterable[Configuration], patterns: Sequence[str]) -> list[Configuration]:
    """Those whose name fits any of the shell patterns (``*`` also crosses the slashes)."""
    return [
        one
        for one in everything
        if not patterns or any(fnmatch.fnmatch(one.name, pattern) for pattern in patterns)
    ]
