# SPDX-License-Identifier: Apache-2.0
"""The jobs in which mutants are run: small, and together they execute much of the parallel code.

Models, and the words for layouts, are those of the matrix. A rank costs as much as a layer, so most
jobs have two.
"""

from collections.abc import Sequence

from megatron_ttrace.evaluation.matrix.configurations import (
    SCRIPTS,
    Configuration,
    arguments_of,
)
from megatron_ttrace.trace.errors import TTraceError

_BUCKETS = "--ddp-bucket-size 20000"
"""So small that even these models have several."""
_AUX = "--moe-aux-loss-coeff 0.1"
"""A fault in a term of the loss is visible only if the term is large enough."""


def _job(name: str, nproc: int, model: str, words: str) -> Configuration:
    script = SCRIPTS.get(model, "pretrain_gpt.py")
    return Configuration(name, nproc, arguments_of(model, words), script=script)


LAYOUTS = (
    _job("tp2", 2, "gpt", "tp2"),
    _job("tp2-sp", 2, "gpt", "tp2 sp"),
    _job("tp2-fp16", 2, "gpt", "tp2 --fp16 --loss-scale 256"),
    _job("te-tp2-sp", 2, "llama-te", "tp2 sp"),
    _job("pp2", 2, "gpt", "pp2"),
    _job("pp2-vpp2", 2, "gpt", "pp2 vpp2"),
    _job("pp2-uneven", 2, "gpt", "pp2 --num-layers 3 --decoder-first-pipeline-num-layers 1"),
    _job("pp2-split", 2, "gpt", "pp2 --num-layers 3 --account-for-embedding-in-pipeline-split"),
    _job("pp2-mtp", 2, "llama-te", "pp2 mtp --mtp-detach-heads zero"),
    _job("tp2-mtp", 2, "llama-te", "tp2 mtp"),
    _job("tp2-sp-dsa", 2, "dsa-te", "tp2 sp"),
    _job("dp2", 2, "gpt", f"--overlap-grad-reduce {_BUCKETS}"),
    _job("dp2-tokens", 2, "gpt", "per-token"),
    _job(
        "dp2-accumulate",
        2,
        "gpt",
        "--bf16 --grad-reduce-in-bf16 --ddp-param-name-patterns-for-fp32-local-accumulation all",
    ),
    _job("dp2-zero", 2, "gpt", "zero"),
    _job("dp2-zero-overlap", 2, "gpt", f"zero overlap {_BUCKETS} deep --bf16"),
    _job("cp2", 2, "llama-te", "cp2 zero"),
    _job("cp2-moe", 2, "moe-te", f"cp2 alltoall {_AUX}"),
    _job("ep2", 2, "moe", f"ep2 alltoall zero {_AUX}"),
    _job("ep2-all-gather", 2, "moe-deep", f"ep2 {_AUX}"),
    _job(
        "tp2-sp-ep2",
        2,
        "moe-deep",
        f"tp2 sp ep2 etp1 alltoall zero {_AUX} --moe-z-loss-coeff 0.1",
    ),
    _job("tp2-sp-etp2", 2, "moe-te", f"tp2 sp alltoall {_AUX}"),
    _job("recompute", 2, "gpt", "tp2 recompute uniform 1 --distribute-saved-activations"),
    _job("tp2-dp2-zero", 4, "gpt", "tp2 sp zero"),
    _job("pp2-dp2-zero", 4, "gpt", "pp2 zero overlap --bf16"),
    _job("pp2-vpp2-dp2", 4, "gpt", "pp2 vpp2 --overlap-grad-reduce --no-align-grad-reduce"),
    _job("tp2-pp2", 4, "gpt", "tp2 sp pp2"),
    _job("tp2-ep2", 4, "moe-te", f"tp2 sp ep2 {_AUX}"),
    _job("ep2-edp2-zero", 4, "moe-te", f"ep2 zero overlap {_AUX}"),
    _job("zero-instances", 4, "gpt", "zero --num-distributed-optimizer-instances 2"),
    _job("tp2-sp-hybrid", 2, "hybrid", "tp2 sp"),
    _job("cp2-hybrid", 2, "hybrid", "cp2"),
    _job("cp2-gdn", 2, "gdn-te", "cp2"),
)

_FIRST = {
    "tensor_parallel": ("tp2-sp", "tp2", "te-tp2-sp", "tp2-dp2-zero"),
    "distributed": ("dp2-zero-overlap", "dp2-zero", "dp2", "tp2-dp2-zero", "ep2"),
    "pipeline_parallel": ("pp2-vpp2", "pp2", "pp2-dp2-zero", "pp2-vpp2-dp2", "cp2-moe"),
    "transformer.moe": ("ep2", "tp2-sp-ep2", "ep2-all-gather", "cp2-moe", "tp2-ep2"),
    "ssm": ("tp2-sp-hybrid", "cp2-hybrid", "cp2-gdn"),
    "optimizer": ("dp2-zero", "dp2-zero-overlap", "tp2-dp2-zero", "ep2", "tp2-fp16", "pp2-mtp"),
}
_THEN = (
    *("tp2-dp2-zero", "ep2", "tp2-sp-ep2", "pp2-dp2-zero", "cp2-moe", "pp2-mtp", "tp2-fp16"),
    *("tp2-ep2", "ep2-edp2-zero", "pp2-vpp2-dp2", "zero-instances"),
)
"""In an order in which neighbours differ much."""


def named_layouts(names: Sequence[str]) -> list[Configuration]:
    """Those with these names; all if none is given.

    Raises:
        TTraceError: when one does not exist.
    """
    known = {layout.name: layout for layout in LAYOUTS}
    for name in names:
        if name not in known:
            raise TTraceError(f"--layout {name}: unknown, known are {', '.join(known)}")
    return [known[name] for name in names] or list(LAYOUTS)


def in_order(package: str, names: set[str]) -> list[Configuration]:
    """The layouts with these names, those for a package of Megatron first."""
    order = [*_FIRST.get(package, ()), *_THEN, *(layout.name for layout in LAYOUTS)]
    return sorted(
        (layout for layout in LAYOUTS if layout.name in names),
        key=lambda layout: order.index(layout.name),
    )
