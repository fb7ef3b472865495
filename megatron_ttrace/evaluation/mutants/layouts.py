# SPDX-License-Identifier: Apache-2.0
"""The jobs in which mutants are run: small, and together they run much of the parallel code.

Models and names of layouts are the matrix's; a rank more costs as much as a layer more, so most
have two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megatron_ttrace.errors import TTraceError
from megatron_ttrace.evaluation.matrix import configurations as matrix

_DEEP = "--num-layers 4"
_VPP2 = f"{matrix.PP2} {_DEEP} --num-virtual-stages-per-pipeline-rank 2"
_BUCKETS = "--ddp-bucket-size 20000"
"""So small that even these models have several."""
_AUX = "--moe-aux-loss-coeff 0.1"
"""A fault in what is added to the loss shows when enough is added."""


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """One job.

    Attributes:
        name: of the layout.
        nproc: number of ranks.
        model: one of the matrix's.
        words: Megatron's arguments for the layout.
    """

    name: str
    nproc: int
    model: str
    words: str

    @property
    def arguments(self) -> tuple[str, ...]:
        """All of Megatron's arguments."""
        return tuple(f"{matrix.COMMON} {matrix.MODELS[self.model]} {self.words}".split())


LAYOUTS = (
    Layout("tp2", 2, "gpt", matrix.TP2),
    Layout("tp2-sp", 2, "gpt", f"{matrix.TP2} {matrix.SP}"),
    Layout("tp2-fp16", 2, "gpt", f"{matrix.TP2} --fp16 --loss-scale 256"),
    Layout("te-tp2-sp", 2, "llama-te", f"{matrix.TP2} {matrix.SP}"),
    Layout("pp2", 2, "gpt", matrix.PP2),
    Layout("pp2-vpp2", 2, "gpt", _VPP2),
    Layout("pp2-mtp", 2, "llama-te", f"{matrix.PP2} {matrix.MTP} --mtp-detach-heads {matrix.ZERO}"),
    Layout("tp2-mtp", 2, "llama-te", f"{matrix.TP2} {matrix.MTP}"),
    Layout("tp2-sp-dsa", 2, "dsa-te", f"{matrix.TP2} {matrix.SP}"),
    Layout("dp2", 2, "gpt", f"--overlap-grad-reduce {_BUCKETS}"),
    Layout("dp2-tokens", 2, "gpt", "--calculate-per-token-loss"),
    Layout(
        "dp2-accumulate",
        2,
        "gpt",
        "--bf16 --grad-reduce-in-bf16 --ddp-param-name-patterns-for-fp32-local-accumulation all",
    ),
    Layout("dp2-zero", 2, "gpt", matrix.ZERO),
    Layout(
        "dp2-zero-overlap", 2, "gpt", f"{matrix.ZERO} {matrix.OVERLAP} {_BUCKETS} {_DEEP} --bf16"
    ),
    Layout("cp2", 2, "llama-te", f"{matrix.CP2} {matrix.ZERO}"),
    Layout("cp2-moe", 2, "moe-te", f"{matrix.CP2} {matrix.ALLTOALL} {_AUX}"),
    Layout("ep2", 2, "moe", f"{matrix.EP2} {matrix.ALLTOALL} {matrix.ZERO} {_AUX}"),
    Layout("ep2-all-gather", 2, "moe-deep", f"{matrix.EP2} {_AUX}"),
    Layout(
        "tp2-sp-ep2",
        2,
        "moe-deep",
        f"{matrix.TP2} {matrix.SP} {matrix.EP2} {matrix.ETP1} {matrix.ALLTOALL} {matrix.ZERO} "
        f"{_AUX} --moe-z-loss-coeff 0.1",
    ),
    Layout("tp2-sp-etp2", 2, "moe-te", f"{matrix.TP2} {matrix.SP} {matrix.ALLTOALL} {_AUX}"),
    Layout(
        "recompute",
        2,
        "gpt",
        f"{matrix.TP2} --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1 --distribute-saved-activations",
    ),
    Layout("tp2-dp2-zero", 4, "gpt", f"{matrix.TP2} {matrix.SP} {matrix.ZERO}"),
    Layout("pp2-dp2-zero", 4, "gpt", f"{matrix.PP2} {matrix.ZERO} {matrix.OVERLAP} --bf16"),
    Layout("pp2-vpp2-dp2", 4, "gpt", f"{_VPP2} --overlap-grad-reduce --no-align-grad-reduce"),
    Layout("tp2-pp2", 4, "gpt", f"{matrix.TP2} {matrix.SP} {matrix.PP2}"),
    Layout("tp2-ep2", 4, "moe-te", f"{matrix.TP2} {matrix.SP} {matrix.EP2} {_AUX}"),
    Layout("ep2-edp2-zero", 4, "moe-te", f"{matrix.EP2} {matrix.ZERO} {matrix.OVERLAP} {_AUX}"),
    Layout("zero-instances", 4, "gpt", f"{matrix.ZERO} --num-distributed-optimizer-instances 2"),
)
"""All of them."""

_FIRST = {
    "tensor_parallel": ("tp2-sp", "tp2", "te-tp2-sp", "tp2-dp2-zero"),
    "distributed": ("dp2-zero-overlap", "dp2-zero", "dp2", "tp2-dp2-zero", "ep2"),
    "pipeline_parallel": ("pp2-vpp2", "pp2", "pp2-dp2-zero", "pp2-vpp2-dp2", "cp2-moe"),
    "transformer.moe": ("ep2", "tp2-sp-ep2", "ep2-all-gather", "cp2-moe", "tp2-ep2"),
    "optimizer": ("dp2-zero", "dp2-zero-overlap", "tp2-dp2-zero", "ep2", "tp2-fp16", "pp2-mtp"),
}
_THEN = (
    *("tp2-dp2-zero", "ep2", "tp2-sp-ep2", "pp2-dp2-zero", "cp2-moe", "pp2-mtp", "tp2-fp16"),
    *("tp2-ep2", "ep2-edp2-zero", "pp2-vpp2-dp2", "zero-instances"),
)
"""As different from each other as they are."""


def named_layouts(names: Sequence[str]) -> list[Layout]:
    """Those with these names; all when none is given.

    Raises:
        TTraceError: when one does not exist.
    """
    known = {layout.name: layout for layout in LAYOUTS}
    for name in names:
        if name not in known:
            raise TTraceError(f"--layout {name}: unknown, known are {', '.join(known)}")
    return [known[name] for name in names] or list(LAYOUTS)


def in_order(package: str, names: set[str]) -> list[Layout]:
    """Some layouts, those first that are about a package."""
    order = [*_FIRST.get(package, ()), *_THEN, *(layout.name for layout in LAYOUTS)]
    return sorted(
        (layout for layout in LAYOUTS if layout.name in names),
        key=lambda layout: order.index(layout.name),
    )
