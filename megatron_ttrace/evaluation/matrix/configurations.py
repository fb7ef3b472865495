# SPDX-License-Identifier: Apache-2.0
# over 500 lines because: it is a table, one row per layout
"""The matrix as data: layouts x models x dtypes.

Models are small, so that a check takes seconds. Numbers of heads, groups and layers differ on
purpose, so that a transposed or miscounted dim does not fit by chance.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ttrace.evaluation.suites import Data, data_arguments
from megatron_ttrace.resources import launch_dir

if TYPE_CHECKING:
    from megatron_ttrace.runtime.runner import Case

VOCABULARY = 128
COMMON = (
    "--hidden-size 64 --num-attention-heads 8 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 3 --lr 1e-3 --lr-warmup-iters 0 "
    f"--tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --eval-iters 0 "
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
Megatron's local layers and with TransformerEngine's (emulated without a GPU)."""

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
"""Mixtral-like, with sequential and with grouped experts, and one with DeepSeek's additions."""
MODELS["mla-te"] = (
    "--num-layers 2 --transformer-impl transformer_engine --normalization RMSNorm --swiglu "
    "--untie-embeddings-and-output-weights --disable-bias-linear --multi-latent-attention "
    "--q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8 "
    "--qk-layernorm"
)
MODELS["mla-q-te"] = (
    MODELS["mla-te"].replace("--q-lora-rank 24 ", "").replace(" --qk-layernorm", "")
)
"""DeepSeek-like: multi-head latent attention with compressed and with uncompressed queries."""
MODELS["dsa-te"] = (
    f"{MODELS['mla-te']} --experimental-attention-variant dsa --dsa-indexer-n-heads 4 "
    "--dsa-indexer-head-dim 16 --dsa-indexer-topk 32 --dsa-indexer-loss-coeff 0.1 "
    "--no-dsa-indexer-rotate-activation"
)
"""Sparse attention, whose indexer selects all tokens here. Its rotation is a CUDA kernel."""

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
DTYPES |= {
    "fp16": "--fp16",
    "fp8-delayed": "--bf16 --fp8-format hybrid --fp8-recipe delayed",
    "fp8-tensorwise": "--bf16 --fp8-format hybrid --fp8-recipe tensorwise",
    "fp8-blockwise": "--bf16 --fp8-format e4m3 --fp8-recipe blockwise",
}
FP8 = tuple(name for name in DTYPES if name.startswith("fp8"))
"""With TransformerEngine's layers only."""

FLAGS = {
    "tp2": "--tensor-model-parallel-size 2",
    "tp4": "--tensor-model-parallel-size 4",
    "sp": "--sequence-parallel",
    "pp2": "--pipeline-model-parallel-size 2",
    "pp4": "--pipeline-model-parallel-size 4",
    "deep": "--num-layers 4",
    "vpp2": "--num-layers 4 --num-virtual-stages-per-pipeline-rank 2",
    "cp2": "--context-parallel-size 2",
    "a2a": "--cp-comm-type a2a",
    "all_gather": "--cp-comm-type all_gather",
    "ep2": "--expert-model-parallel-size 2",
    "ep4": "--expert-model-parallel-size 4",
    "etp1": "--expert-tensor-parallel-size 1",
    "alltoall": "--moe-token-dispatcher-type alltoall",
    "in-pieces": "--moe-token-dispatcher-type alltoall --overlap-moe-expert-parallel-comm",
    "late-wgrad": "--delay-wgrad-compute",
    "zero": "--use-distributed-optimizer",
    "overlap": "--overlap-grad-reduce --overlap-param-gather",
    "fsdp": "--use-megatron-fsdp --ckpt-format fsdp_dtensor --data-parallel-sharding-strategy",
    "fsdp2": "--use-torch-fsdp2 --ckpt-format torch_dist --no-gradient-accumulation-fusion "
    "--untie-embeddings-and-output-weights",
    "recompute": "--recompute-granularity",
    "uniform": "full --recompute-method uniform --recompute-num-layers",
    "block": "full --recompute-method block --recompute-num-layers",
    "per-token": "--calculate-per-token-loss",
    "mtp": "--mtp-num-layers 1",
    "rope": "--position-embedding-type rope",
    "sinks": "--softmax-type learnable",
    "qk-norm": "--qk-layernorm",
    "window": "--window-size 7,0",
    "gate": "--attention-output-gate",
    "kv1": "--group-query-attention --num-query-groups 1",
    "kv2": "--group-query-attention --num-query-groups 2",
    "shared-overlap": "--moe-shared-expert-overlap",
    "loss-only": "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout",
    "eod": "--eod-mask-loss",
    "reset": "--reset-position-ids --reset-attention-mask --eod-mask-loss",
    "decoupled": "--decoupled-lr 5e-4 --weight-decay 0.1",
    "cpu-init": "--use-cpu-initialization",
    "packed": "--dataloader-inter-document-masking --micro-batch-size 1",
    "fim": "--fim-data --fim-rate 0.5 --fim-spm-rate 0.5 --fim-prefix-token 1 --fim-middle-token 2 "
    "--fim-suffix-token 3 --fim-pad-token 4 --fim-eod-token 127",
    "sinkhorn": "--moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0",
    "quantile": "--moe-router-load-balancing-type quantile_balancing --moe-aux-loss-coeff 0",
    "capacity": "--moe-expert-capacity-factor 1.0",
    "padded": "--moe-pad-expert-input-to-capacity",
    "meta": "--init-model-with-meta-device",
    # torch.empty() is filled with NaN.
    "deterministic": "--deterministic-mode",
    "balanced": "--moe-router-force-load-balancing",
    "jitter": "--moe-input-jitter-eps 0.1",
    # Matrices of more than a million elements.
    "wide": "--num-layers 1 --hidden-size 1024",
    "precise": "--use-precision-aware-optimizer",
    "fp8-moments": "--exp-avg-dtype fp8 --exp-avg-sq-dtype fp16",
    "offload": "--use-precision-aware-optimizer --optimizer-cpu-offload",
    "half": "--optimizer-offload-fraction 0.5 --overlap-cpu-optimizer-d2h-h2d",
    "bf16-moments": "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
    "muon": "--optimizer muon --muon-tp-mode",
    "hierarchical": "--context-parallel-size 4 --hierarchical-context-parallel-sizes 2 2 "
    "--cp-comm-type a2a+p2p",
}
"""Short words for the arguments of layouts."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a job is spread over ranks.

    Attributes:
        name: its usual name.
        nproc: number of ranks.
        arguments: Megatron's, with the words of :data:`FLAGS`.
        models: of :data:`MODELS`, those that can run it.
        dtypes: of :data:`DTYPES`.
        data: what it is trained on.
        finding: words of a heading in docs/findings.md, if a proven fault of Megatron makes the
            layout diverge.
    """

    name: str
    nproc: int
    arguments: str
    models: tuple[str, ...] = ("gpt", "llama")
    dtypes: tuple[str, ...] = WIDE
    data: Data = Data.MOCK
    finding: str = ""


TE = ("gpt-te", "llama-te")
MLA = ("mla-te",)
DSA = ("dsa-te",)
MOE = ("moe", "moe-te", "moe-deep")
GROUPED = ("moe-te", "moe-deep")
FP32 = ("fp32",)
BF16 = ("bf16",)
FP16 = ("fp16",)
DOCS = Data.DOCUMENTS

LAYOUTS = (
    Layout("single", 1, ""),
    Layout("tp2", 2, "tp2"),
    Layout("tp2-sp", 2, "tp2 sp", ("gpt",)),
    Layout("tp4", 4, "tp4"),
    Layout("tp2-cpu-initialization", 2, "tp2 cpu-init", dtypes=FP32),
    Layout("pp2", 2, "pp2"),
    Layout("pp4", 4, "pp4 deep"),
    Layout("pp2-vpp2", 2, "pp2 vpp2"),
    Layout("dp2", 2, ""),
    Layout("dp4", 4, ""),
    Layout("dp2-zero", 2, "zero"),
    Layout("dp2-zero-overlap", 2, "zero overlap"),
    Layout("dp4-zero", 4, "zero"),
    Layout("dp2-overlap", 2, "--overlap-grad-reduce"),
    Layout("tp2-pp2", 4, "tp2 pp2"),
    Layout("tp2-dp2", 4, "tp2"),
    Layout("tp2-sp-dp2", 4, "tp2 sp", ("gpt",)),
    Layout("tp2-dp2-zero", 4, "tp2 zero"),
    Layout("tp2-sp-pp2-zero", 4, "tp2 sp pp2 zero", ("gpt",)),
    Layout("pp2-dp2-zero", 4, "pp2 zero"),
    Layout("pp2-dp2-zero-overlap", 4, "pp2 zero overlap"),
    Layout(
        "pp2-vpp2-dp2-zero-step",
        4,
        "pp2 vpp2 zero overlap --overlap-param-gather-with-optimizer-step --ckpt-format torch",
        ("gpt",),
    ),
    Layout("recompute-uniform", 2, "tp2 deep recompute uniform 2"),
    Layout("recompute-block", 2, "tp2 deep recompute block 1"),
    Layout("recompute-selective", 2, "tp2 recompute selective"),
    Layout("per-token-loss", 2, "per-token"),
    Layout("te-tp2-sp", 2, "tp2 sp", TE),
    Layout("te-pp2", 2, "pp2", TE),
    Layout("te-dp2-zero", 2, "zero", TE),
    Layout("cp2", 2, "cp2", TE),
    Layout("cp2-all-gather", 2, "cp2 all_gather", TE),
    Layout("cp2-a2a", 2, "cp2 a2a", TE),
    Layout("tp2-sp-cp2", 4, "tp2 sp cp2", TE),
    Layout("pp2-cp2", 4, "pp2 cp2", TE),
    Layout("ep2", 2, "ep2", MOE),
    Layout("ep2-alltoall", 2, "ep2 alltoall", MOE),
    Layout("ep4-alltoall-zero", 4, "ep4 alltoall zero", GROUPED),
    Layout("ep2-edp2-zero", 4, "ep2 zero overlap", ("moe-te",)),
    Layout("moe-dp2", 2, "", ("moe",)),
    Layout("tp2-sp-etp2", 2, "tp2 sp", GROUPED),
    Layout("tp2-sp-etp2-alltoall", 2, "tp2 sp alltoall", GROUPED),
    Layout("tp2-sp-ep2", 2, "tp2 sp ep2 etp1 alltoall", GROUPED),
    Layout("tp2-sp-ep2-etp2", 4, "tp2 sp ep2", GROUPED),
    Layout("tp2-sp-ep2-etp2-alltoall", 4, "tp2 sp ep2 alltoall", ("moe-te",)),
    Layout("tp2-sp-ep4", 4, "tp2 sp ep4 etp1", ("moe-te",)),
    Layout(
        "ep2-cpu-initialization",
        2,
        "ep2 cpu-init",
        ("moe",),
        FP32,
        finding="`--use-cpu-initialization` with expert parallelism",
    ),
    Layout("pp2-ep2", 4, "pp2 ep2 alltoall", ("moe", "moe-deep")),
    Layout("pp2-vpp2-ep2", 4, "pp2 ep2 vpp2", ("moe-te",)),
    Layout("cp2-ep2", 2, "cp2 ep2", GROUPED),
    Layout("cp2-ep2-alltoall", 4, "cp2 ep2 alltoall zero", ("moe-te",)),
    Layout("ep2-recompute", 2, "ep2 alltoall recompute uniform 1", GROUPED),
    Layout(
        "ep2-recompute-moe",
        2,
        "ep2 alltoall recompute selective --recompute-modules moe",
        ("moe-te",),
    ),
    Layout("ep2-shared-overlap", 2, "ep2 alltoall --moe-shared-expert-overlap", ("moe-deep",)),
    Layout("tp2-sp-pp2-ep2", 8, "tp2 sp pp2 ep2 etp1 alltoall", ("moe-te",)),
    Layout("ep2-in-pieces", 2, "ep2 in-pieces", MOE, BF16),
    Layout("ep2-in-pieces-late-wgrad", 2, "ep2 in-pieces late-wgrad zero overlap", GROUPED, BF16),
    Layout("tp2-sp-ep2-in-pieces", 4, "tp2 sp ep2 etp1 in-pieces", GROUPED, BF16),
    Layout("pp2-vpp2-ep2-in-pieces", 4, "pp2 ep2 vpp2 in-pieces", GROUPED, BF16),
    Layout(
        "pp2-vpp2-ep2-in-pieces-mtp",
        4,
        "pp2 ep2 vpp2 in-pieces late-wgrad mtp",
        ("moe-deep",),
        BF16,
    ),
    Layout("ep2-in-pieces", 2, "ep2 in-pieces", ("moe-te",), FP8),
    Layout(
        "ep2-in-pieces-dense-last",
        2,
        "ep2 in-pieces --moe-layer-freq [1,0]",
        ("moe-te",),
        BF16,
        finding="a dense last layer is not followed by the final norm",
    ),
    Layout("dp2-fsdp-zero1", 2, "fsdp optim", ("gpt-te",)),
    Layout("dp2-fsdp-zero2", 2, "fsdp optim_grads", TE),
    Layout("dp2-fsdp-zero3", 2, "fsdp optim_grads_params", TE),
    Layout("dp4-fsdp-zero3-overlap", 4, "fsdp optim_grads_params overlap", ("llama-te",)),
    Layout("tp2-sp-dp2-fsdp-zero3", 4, "tp2 sp fsdp optim_grads_params", ("llama-te",)),
    Layout("cp2-fsdp-zero3", 2, "cp2 fsdp optim_grads_params", ("llama-te",)),
    Layout("tp2-sp-dp2-fsdp-zero3", 4, "tp2 sp fsdp optim_grads_params", ("moe-te",)),
    Layout("ep2-edp2-fsdp-zero3", 4, "ep2 fsdp optim_grads_params", ("moe-te",)),
    Layout("ep2-fsdp-zero1", 2, "ep2 fsdp optim", ("moe-te",)),
    Layout(
        "ep2-fsdp-zero3",
        2,
        "ep2 fsdp optim_grads_params",
        ("moe-te",),
        finding="Megatron-FSDP and experts without copies",
    ),
    Layout(
        "tp2-sp-dp2-fsdp-zero3-per-token",
        4,
        "tp2 sp per-token fsdp optim_grads_params",
        ("llama-te",),
        BF16,
        finding="Megatron-FSDP and per-token losses",
    ),
    Layout(
        "tp2-sp-dp2-fsdp-zero3-per-token-fp32-gradients",
        4,
        "tp2 sp per-token fsdp optim_grads_params --megatron-fsdp-main-grads-dtype fp32",
        ("llama-te",),
        BF16,
    ),
    Layout(
        "dp4-fsdp-zero3-instances-overlap",
        4,
        "fsdp optim_grads_params overlap --num-distributed-optimizer-instances 2",
        ("llama-te",),
        FP32,
    ),
    Layout(
        "dp4-fsdp-zero3-instances",
        4,
        "fsdp optim_grads_params --num-distributed-optimizer-instances 2",
        ("llama-te",),
        FP32,
        finding="Megatron-FSDP in several instances",
    ),
    Layout(
        "dp4-fsdp-zero3-outer-optim",
        4,
        "fsdp optim_grads_params overlap --num-distributed-optimizer-instances 2 "
        "--outer-dp-sharding-strategy optim",
        ("llama-te",),
        FP32,
        finding="`--outer-dp-sharding-strategy optim`",
    ),
    Layout(
        "dp2-fsdp-zero3-unclipped",
        2,
        "fsdp optim_grads_params --clip-grad 0",
        ("llama-te",),
        FP32,
        finding="Megatron-FSDP and `--clip-grad 0`",
    ),
    Layout(
        "dp2-global-aux-loss",
        2,
        "--moe-router-load-balancing-type global_aux_loss",
        ("moe-te",),
        FP32,
        finding="Global auxiliary loss",
    ),
    Layout("dp2-fsdp2", 2, "fsdp2", ("llama", "gpt-te", "moe-te")),
    Layout("dp3-fsdp2", 3, "fsdp2 --global-batch-size 12", ("gpt-te",)),
    Layout("tp2-sp-dp2-fsdp2", 4, "tp2 sp fsdp2", ("llama-te",)),
    Layout("cp2-fsdp2", 2, "cp2 fsdp2", ("llama-te",), BF16),
    Layout(
        "dp2-fsdp2-whole-recompute",
        2,
        "fsdp2 --torch-fsdp2-no-reshard-after-forward recompute selective --recompute-modules "
        "layernorm mlp",
        ("llama-te",),
        BF16,
    ),
    Layout(
        "dp2-fsdp2-per-token",
        2,
        "fsdp2 per-token",
        ("llama-te",),
        BF16,
        finding="torch FSDP2 and per-token losses",
    ),
    Layout("cp2-dp2", 4, "cp2", ("llama-te",)),
    Layout("cp2-zero-overlap", 2, "cp2 zero overlap", ("llama-te",)),
    Layout("cp2-dp2-zero-overlap", 4, "cp2 zero overlap", ("llama-te",)),
    Layout("tp2-sp-pp2-cp2", 8, "tp2 sp pp2 cp2", ("llama-te",)),
    Layout("tp2-sp-pp2-cp2-zero-overlap", 8, "tp2 sp pp2 cp2 zero overlap", ("llama-te",)),
    Layout("tp2-sp", 2, "tp2 sp", ("mla-te", "mla-q-te")),
    Layout("pp2", 2, "pp2", MLA),
    Layout("cp2", 2, "cp2", MLA),
    Layout("tp2-sp-cp2", 4, "tp2 sp cp2", MLA),
    Layout("tp2", 2, "tp2", ("mla-te", "mla-q-te"), finding="MLA without sequence parallelism"),
    Layout("tp2-sp", 2, "tp2 sp", DSA, FP32),
    Layout("tp2-sp-top8", 2, "tp2 sp --dsa-indexer-topk 8", DSA, FP32),
    Layout("pp2", 2, "pp2", DSA, FP32),
    Layout(
        "cp2-all-gather",
        2,
        "cp2 --cp-comm-type allgather",
        DSA,
        finding="Sparse attention's indexer under context parallelism",
    ),
    Layout("tp2-sp-dp2-zero", 4, "tp2 sp zero", DSA, FP32),
    Layout("tp2-sp-pp2", 4, "tp2 sp pp2", DSA, FP32),
    Layout(
        "sinks-tp2",
        2,
        "tp2 sinks --clip-grad 0",
        ("gpt", "llama-te"),
        finding="Attention sinks and TP",
    ),
    Layout(
        "sinks-tp2-sp",
        2,
        "tp2 sp sinks --clip-grad 0",
        ("gpt", "llama-te"),
        finding="Attention sinks and TP",
    ),
    Layout("sinks-pp2", 2, "pp2 sinks", ("gpt", "llama-te")),
    Layout("sinks-cp2-a2a", 2, "cp2 a2a sinks", TE),
    Layout("qk-norm-tp2", 2, "tp2 qk-norm", ("gpt", "llama-te")),
    Layout("qk-norm-tp2-sp", 2, "tp2 sp qk-norm", ("gpt", "llama-te")),
    Layout("qk-norm-cp2", 2, "cp2 qk-norm", ("llama-te",)),
    Layout("window-tp2", 2, "tp2 window", ("gpt", "llama-te")),
    Layout("window-alternating-pp2", 2, "pp2 window --window-attn-skip-freq 2", ("llama-te",)),
    Layout("window-cp2-a2a", 2, "cp2 a2a window", ("llama-te",)),
    Layout("window-cp2-all-gather", 2, "cp2 all_gather window", ("llama-te",)),
    Layout("eod-dp2", 2, "eod", ("gpt",), data=DOCS),
    Layout("eod-pp2", 2, "pp2 eod", ("gpt",), data=DOCS),
    Layout("eod-cp2", 2, "cp2 eod", ("llama-te",), data=DOCS, finding="masks and CP"),
    Layout("eod-per-token-dp2", 2, "eod per-token", ("gpt",), data=DOCS),
    Layout("eod-per-token-pp2", 2, "pp2 eod per-token", ("gpt",), data=DOCS),
    Layout("eod-per-token-cp2", 2, "cp2 eod per-token", TE, data=DOCS),
    Layout("eod-per-token-tp2-sp-cp2", 4, "tp2 sp cp2 eod per-token", ("llama-te",), data=DOCS),
    Layout("eod-per-token-cp2-dp2", 4, "cp2 eod per-token", ("llama-te",), data=DOCS),
    Layout("reset-tp2", 2, "tp2 reset", ("gpt",), data=DOCS),
    Layout("reset-dp2", 2, "reset", ("gpt",), data=DOCS),
    Layout("reset-pp2", 2, "pp2 reset", ("gpt",), data=DOCS),
    Layout("reset-tp2-sp", 2, "tp2 sp reset", ("gpt-te",), data=DOCS),
    Layout("clip-tp2-dp2-zero", 4, "tp2 zero --clip-grad 0.01", ("gpt",)),
    Layout("clip-pp2", 2, "pp2 --clip-grad 0.01", ("gpt",)),
    Layout("decoupled-lr-tp2-pp2", 4, "tp2 pp2 decoupled", ("gpt",)),
    Layout("decoupled-lr-dp2-zero", 2, "zero decoupled", ("gpt",)),
    Layout("untied-tp2", 2, "tp2 --untie-embeddings-and-output-weights", ("gpt",)),
    Layout("mtp-tp2", 2, "tp2 mtp", ("llama-te",)),
    Layout("mtp-pp2", 2, "pp2 mtp", ("llama-te",)),
    Layout("mtp-tied-pp2", 2, "pp2 mtp rope", ("gpt-te",)),
    Layout("mtp-pp2-vpp2", 2, "pp2 vpp2 mtp", ("llama-te",)),
    Layout("mtp-tp2-sp-pp2", 4, "tp2 sp pp2 mtp", ("llama-te",)),
    Layout("mtp-cp2", 2, "cp2 mtp", ("llama-te",), finding="MTP and CP"),
    Layout("tp2", 2, "tp2", ("gpt-te",), FP8),
    Layout("tp2-sp", 2, "tp2 sp", TE, FP8),
    Layout("pp2", 2, "pp2", ("gpt-te",), FP8),
    Layout("dp2-zero", 2, "zero", ("gpt-te",), FP8),
    Layout("cp2", 2, "cp2", TE, FP8),
    Layout("tp2-sp-cp2", 4, "tp2 sp cp2", ("llama-te",), FP8),
    Layout("tp2-sp-pp2-zero", 4, "tp2 sp pp2 zero", ("gpt-te",), FP8),
    Layout("ep2", 2, "ep2", ("moe-te",), FP8),
    Layout("tp2-sp-ep2", 2, "tp2 sp ep2 etp1 alltoall", ("moe-te",), FP8),
    Layout("tp2-sp-etp2", 2, "tp2 sp", ("moe-te",), FP8),
    Layout("dp2-fsdp-zero3", 2, "fsdp optim_grads_params", ("gpt-te",), FP8),
    Layout("dp2-fsdp2", 2, "fsdp2", ("gpt-te",), FP8[:1]),
    Layout("ep2-edp2-fsdp-zero3", 4, "ep2 fsdp optim_grads_params", ("moe-te",), FP8[-1:]),
    Layout("mtp-tp2-sp-ep2-etp2", 4, "tp2 sp ep2 alltoall mtp", ("moe-deep",), FP8[-1:]),
    Layout("dp2-zero-fp8-weights", 2, "zero --fp8-param-gather", ("gpt-te",), FP8[:1]),
    Layout("tp2", 2, "tp2", ("gpt-te",), FP16),
    Layout("dp4-zero-overlap", 4, "zero overlap", ("llama-te",), FP16),
    Layout("pp2-constant-scale", 2, "pp2 --loss-scale 1024", ("gpt",), FP16),
    Layout("tp2-sp", 2, "tp2 sp", ("moe-te",), FP16),
    Layout("muon-dp2-zero", 2, "zero muon duplicated", ("gpt-te",), BF16),
    Layout(
        "muon-dp2-zero-unpadded",
        2,
        "zero overlap muon blockwise --no-use-layer-wise-param-layout",
        ("llama-te",),
        BF16,
    ),
    Layout("muon-tp2-sp-blockwise", 2, "tp2 sp muon blockwise", ("llama-te",)),
    Layout("muon-tp2-duplicated", 2, "tp2 muon duplicated --muon-nesterov", ("gpt-te",)),
    Layout(
        "muon-tp4-kv2",
        4,
        "tp4 kv2 muon duplicated",
        ("gpt-te",),
        BF16,
        finding="Muon, and fewer query groups than TP ranks",
    ),
    Layout("muon-tp2-distributed", 2, "tp2 sp muon distributed", ("llama-te",)),
    Layout("muon-tp2-sp-ep2-dp2", 4, "tp2 sp ep2 alltoall muon duplicated", ("moe-te",), BF16),
    Layout("muon-pp2-dp2-zero", 4, "pp2 zero overlap muon duplicated", ("llama-te",), BF16),
    Layout("precise-dp2-zero", 2, "zero precise", ("gpt-te",), BF16),
    Layout(
        "precise-fp8-moments-tp2-dp2-zero", 4, "tp2 zero precise fp8-moments", ("llama-te",), BF16
    ),
    Layout(
        "precise-bf16-dp2-zero",
        2,
        "zero precise bf16-moments --main-grads-dtype bf16",
        ("gpt-te",),
        BF16,
    ),
    Layout("lion-tp2-dp2", 4, "tp2 --optimizer lion", ("llama-te",)),
    Layout("sgd-tp2-dp2", 4, "tp2 --optimizer sgd", ("llama-te",)),
    Layout("soap-dp2-zero", 2, "zero --optimizer soap", ("llama-te",), BF16),
    Layout("soap-tp2", 2, "tp2 --optimizer soap", ("llama-te",)),
    Layout("sinkhorn-tp2-sp", 2, "tp2 sp sinkhorn", ("moe-te",)),
    Layout("sinkhorn-cp2", 2, "cp2 sinkhorn --moe-router-topk 1", ("moe-te",)),
    Layout("sinkhorn-pp2-ep2", 4, "pp2 ep2 alltoall sinkhorn", ("moe-te",)),
    Layout("capacity-tp2-sp", 2, "tp2 sp capacity", ("moe-te",)),
    Layout("capacity-ep2", 2, "ep2 alltoall capacity", ("moe-te",)),
    Layout("capacity-padded-ep2", 2, "ep2 alltoall capacity padded", ("moe-te",)),
    Layout("quantile-tp2-sp", 2, "tp2 sp quantile", ("moe-te",), FP32),
    Layout("fused-router-tp2-sp", 2, "tp2 sp --moe-router-fusion", GROUPED),
    Layout("tp2", 2, "tp2", ("hybrid",)),
    Layout("tp2-sp", 2, "tp2 sp", ("hybrid",)),
    Layout("cp2", 2, "cp2", ("hybrid",)),
    Layout("pp2-piped", 2, "pp2 --hybrid-layer-pattern M-|M*", ("hybrid",)),
    Layout("pp2-vpp2-piped", 2, "pp2 --hybrid-layer-pattern M|-|M|*", ("hybrid",)),
    Layout("tp2-sp-cp2-zero", 4, "tp2 sp cp2 zero", ("hybrid",)),
    Layout("ep2", 2, "ep2", ("hybrid-moe",)),
    Layout("tp2-sp-ep2", 2, "tp2 sp ep2 etp1 alltoall", ("hybrid-moe",)),
    Layout("pp2", 2, "pp2", ("gdn-te",)),
    Layout("cp2", 2, "cp2", ("gdn-te",)),
    Layout("tp2-sp", 2, "tp2 sp", ("gdn-te",), finding="start with the same convolution"),
    Layout("tp2", 2, "tp2", ("gdn-te",), finding="gradients of a norm are never summed"),
    Layout(
        "recompute-mlp-tp2",
        2,
        "tp2 recompute selective --recompute-modules mlp",
        ("llama-te",),
        FP32,
    ),
    Layout(
        "dp2-fsdp-zero3-recompute",
        2,
        "fsdp optim_grads_params recompute selective --recompute-modules layernorm mlp core_attn",
        ("llama-te",),
        FP32,
    ),
    Layout(
        "dp2-fsdp-zero3-meta",
        2,
        "fsdp optim_grads_params meta",
        ("llama-te",),
        FP32,
    ),
    Layout(
        "ep2-fsdp-zero3-meta",
        2,
        "ep2 alltoall fsdp optim_grads_params per-token meta deterministic",
        ("moe-deep",),
        finding="Megatron-FSDP on the meta device",
    ),
    Layout("ep2-fsdp-zero3-per-token", 2, "ep2 fsdp optim_grads_params per-token", ("moe-deep",)),
    Layout("balanced-ep2", 2, "ep2 alltoall balanced", ("moe-deep",)),
    Layout("jitter-ep2", 2, "ep2 alltoall jitter", ("moe-te",), FP32),
    Layout("wide-tp2", 2, "tp2 wide", ("gpt",), FP32),
    Layout("defer-pp2", 2, "pp2 --defer-embedding-wgrad-compute", ("gpt-te",)),
    Layout("packed-tp2-sp", 2, "tp2 sp packed", ("llama-te",), data=DOCS),
    Layout("packed-dp2-zero", 2, "zero packed", ("llama-te",), data=DOCS),
    Layout("offload-tp2-zero", 2, "tp2 zero offload", ("llama-te",), BF16),
    Layout("offload-half-dp2-zero", 2, "zero overlap offload half", ("llama-te",), BF16),
    Layout("fim-dp2", 2, "fim", ("gpt",), FP32, DOCS),
    Layout("cp4-hierarchical", 4, "hierarchical", ("llama-te",)),
    # Fewer groups of keys and values than tensor-parallel ranks.
    Layout("kv1-tp2", 2, "tp2 kv1", ("gpt", "hybrid"), FP32),
    Layout("kv1-tp4", 4, "tp4 kv1", ("llama",), BF16),
    Layout("kv2-tp4", 4, "tp4 kv2", ("llama",)),
    Layout("kv2-tp4-sp", 4, "tp4 sp kv2", ("llama-te",)),
    Layout("kv1-tp4-sp-qk-norm", 4, "tp4 sp kv1 qk-norm", ("llama-te",)),
    Layout("kv1-tp2-sp-cp2", 4, "tp2 sp cp2 kv1", ("llama-te",)),
    Layout("kv1-tp2-pp2-dp2-zero", 8, "tp2 pp2 zero kv1", ("llama",), FP32),
    Layout("kv1-tp2-dp2-zero-overlap", 4, "tp2 zero overlap kv1", ("llama-te",), BF16),
    Layout("kv1-tp2-sp-ep2", 2, "tp2 sp ep2 etp1 alltoall kv1", ("moe-te",), FP32),
    Layout("kv2-tp4-sp-etp4", 4, "tp4 sp kv2", ("moe-deep",), BF16),
    Layout(
        "kv1-sinks-tp2",
        2,
        "tp2 sinks kv1 --clip-grad 0",
        ("gpt-te",),
        FP32,
        finding="Attention sinks and TP",
    ),
    Layout("kv1-window-gate-tp2", 2, "tp2 window gate kv1", ("llama-te",), FP32),
    Layout("kv1-recompute-tp2", 2, "tp2 sp recompute selective kv1", ("llama-te",), FP32),
    Layout("kv1-fp8-tp2", 2, "tp2 sp kv1", ("llama-te",), FP8[:1]),
    # Shared experts that are reduced late.
    Layout("shared-overlap-tp2", 2, "tp2 sp alltoall shared-overlap", ("moe-deep",)),
    Layout(
        "shared-overlap-kv1-tp2-ep2", 4, "tp2 sp ep2 alltoall shared-overlap kv1", ("moe-deep",)
    ),
    # Stages with nothing but the loss.
    Layout("loss-only", 4, "loss-only Et|t|t|L --num-layers 3", ("llama-te",), FP32),
    Layout("loss-only-mtp", 4, "loss-only Et|t|m|L mtp", ("llama-te",)),
)


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One job: a layout of a model in a dtype. For the fields see :class:`Layout`."""

    name: str
    nproc: int
    arguments: tuple[str, ...]
    data: Data = Data.MOCK
    finding: str = ""
    script: str = "pretrain_gpt.py"

    def case(self, directory: Path, name: str = "", more: tuple[str, ...] = ()) -> Case:
        """To be run below ``directory``, under another name and with more arguments if given."""
        from megatron_ttrace.runtime.runner import Case

        data = data_arguments(self.data, directory, VOCABULARY)
        return Case(
            name=(name or self.name).replace("/", "-"),
            arguments=(*self.arguments, *data, *more),
            nproc=self.nproc,
            script=launch_dir() / self.script,
        )


def arguments_of(model: str, words: str) -> tuple[str, ...]:
    """Megatron's arguments without the data set, for a model and the words of a layout."""
    flags = " ".join(FLAGS.get(word, word) for word in words.split())
    return tuple(f"{COMMON} {MODELS[model]} {flags}".split())


def configurations() -> list[Configuration]:
    """All of them; names are ``layout/model/dtype``."""
    return [
        Configuration(
            f"{layout.name}/{model}/{dtype}",
            layout.nproc,
            arguments_of(model, f"{layout.arguments} {DTYPES[dtype]}"),
            layout.data,
            layout.finding,
            SCRIPTS.get(model, "pretrain_gpt.py"),
        )
        for layout in LAYOUTS
        for model in layout.models
        for dtype in layout.dtypes
    ]


def select(everything: Iterable[Configuration], patterns: Sequence[str]) -> list[Configuration]:
    """Those whose name matches any of the shell patterns (``*`` also matches slashes)."""
    return [
        one
        for one in everything
        if not patterns or any(fnmatch.fnmatch(one.name, pattern) for pattern in patterns)
    ]
