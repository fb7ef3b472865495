# SPDX-License-Identifier: Apache-2.0
"""The matrix as data: layouts (``layouts.toml``) x models x dtypes.

Models are small, so that a check takes seconds. Numbers of heads, groups and layers differ on
purpose, so that a transposed or miscounted dim does not fit by chance.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ttrace.evaluation.suites import Data, data_arguments
from megatron_ttrace.resources import launch_dir
from megatron_ttrace.trace import codec

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
"""FP8 with TransformerEngine's layers only."""

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


LAYOUTS_FILE = Path(__file__).with_name("layouts.toml")


def _layouts() -> tuple[Layout, ...]:
    rows = tomllib.loads(LAYOUTS_FILE.read_text(encoding="utf-8"))["layout"]
    return codec.decode(tuple[Layout, ...], rows)


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
        for layout in _layouts()
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
