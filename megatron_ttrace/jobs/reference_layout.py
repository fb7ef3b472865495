# SPDX-License-Identifier: Apache-2.0
"""The layout of a reference that does not fit one device: ``--ttrace-reference-layout``.

Tensor, expert and pipeline parallelism divide a model's weights, context parallelism its
activations: what a device has no room for. Everything else is as on one device: no interleaving, no
overlap, and sequence parallelism only where Megatron requires it, beside experts. Experts are
divided among tensor-, context- and data-parallel ranks, none of them within.
"""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

from megatron_ttrace.trace import codec
from megatron_ttrace.trace.errors import TTraceError

_OPTIONS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
}
"""Megatron's argument of each axis."""
_PART = re.compile(r"([a-z]+)=([0-9]{1,4})")
_EXAMPLE = 'give the sizes as in "tp=2 pp=4"'

_UNSUPPORTED = {
    "fp4": "--fp4-format",
    "experimental_attention_variant": "--experimental-attention-variant",
    "enable_mhc_connections": "--enable-mhc-connections",
    "heterogeneous_layers_config_path": "--heterogeneous-layers-config-path",
    "heterogeneous_layers_config_encoded_json": "--heterogeneous-layers-config-encoded-json",
    "sft": "--sft",
    "dataloader_inter_document_masking": "--dataloader-inter-document-masking",
    "fim_data": "--fim-data",
    "use_torch_fsdp2": "--use-torch-fsdp2",
    "optimizer_cpu_offload": "--optimizer-cpu-offload",
    "use_precision_aware_optimizer": "--use-precision-aware-optimizer",
}
"""Options of a job that no reference on several ranks is made for, by their attribute."""
_OPTIMIZERS = ("adam", "sgd")
"""Those that update each element by itself, so that a rank's shard does not matter."""


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the axes.

    Data-parallel ranks are added where the others are too few for the expert-parallel ones.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1

    @property
    def ranks(self) -> int:
        """Of the reference run."""
        return self.pp * math.lcm(self.tp * self.cp, self.ep)

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return self.ranks // (self.tp * self.pp * self.cp)

    def __str__(self) -> str:
        return " ".join(f"{name}={size}" for name, size in self._sizes() if size > 1)

    def _sizes(self) -> Iterator[tuple[str, int]]:
        return ((name, getattr(self, name)) for name in _OPTIONS)

    def arguments(self, *, experts: bool) -> dict[str, int | bool]:
        """Megatron's arguments of the layout, for a model with or without experts."""
        sizes: dict[str, int | bool] = {_OPTIONS[name]: size for name, size in self._sizes()}
        if experts:
            sizes |= {"expert_tensor_parallel_size": 1, "sequence_parallel": self.tp > 1}
        return sizes

    def words(self, *, experts: bool) -> list[str]:
        """The same as words of a command line."""
        words = []
        for name, value in self.arguments(experts=experts).items():
            if value is not False:
                words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        return words

    def overrides(self, divisible_by: int, *, experts: bool) -> dict[str, int | bool]:
        """What the reference run has instead of the candidate's arguments.

        The padded vocabulary is to be a multiple of ``divisible_by``; Megatron's own argument is
        multiplied by the tensor-parallel size (megatron/training/vocab_utils.py).
        """
        return {
            **self.arguments(experts=experts),
            "make_vocab_size_divisible_by": divisible_by // self.tp,
        }


def parse(text: str) -> Layout:
    """``"tp=2 pp=4"``; raises ``TTraceError`` for anything else, and for fewer than two ranks."""
    flag = f"--ttrace-reference-layout {text[:60]!a}"
    sizes: dict[str, int] = {}
    for part in text.split():
        match = _PART.fullmatch(part)
        if not match or not int(match[2]):
            raise TTraceError(f"{flag}: {part[:40]!a} is not a size: {_EXAMPLE}")
        axis = match[1]
        if axis not in _OPTIONS:
            known = ", ".join(_OPTIONS)
            raise TTraceError(f"{flag}: a reference can be divided along {known}, not {axis}")
        if axis in sizes:
            raise TTraceError(f"{flag}: {axis} is given twice")
        sizes[axis] = int(match[2])
    layout = Layout(**sizes)
    if layout.ranks < 2:
        raise TTraceError(f"{flag}: is one rank: {_EXAMPLE}, or omit the flag")
    return layout


def refusal(layout: Layout, args: Any, *, world_size: int, devices: int | None) -> str:
    """Why a job cannot have a reference in this layout; empty if it can.

    ``args`` are the candidate's, validated, and ``world_size`` its ranks. ``devices`` are those
    that this rank can use on its machine; ``None`` on a CPU.
    """
    from megatron_ttrace.mcore import balancing  # it imports torch, which parsing does not need

    flag = f'--ttrace-reference-layout "{layout}"'
    if unsupported := [
        name for option, name in _UNSUPPORTED.items() if getattr(args, option, None)
    ]:
        return f"{flag}: {', '.join(unsupported[:3])} cannot be traced on several ranks yet"
    if args.optimizer not in _OPTIMIZERS:
        return f"{flag}: --optimizer {args.optimizer} updates whole matrices, not elements"
    if layout.ranks >= world_size:
        return (
            f"{flag} has {layout.ranks} ranks and this run {world_size}: "
            "give a layout with fewer ranks than the run"
        )
    if devices is not None and devices < layout.ranks:
        return f"{flag} needs {layout.ranks} devices that rank 0 can use, there are {devices}"
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    divides_tokens = layout.tp > 1 or layout.cp > 1
    if divides_tokens and (why := balancing.by_all_tokens(args)):
        return f"{flag}: {', '.join(why.values())} with tp or cp differs from one device by design"
    divided = {
        "--num-experts": (args.num_experts or 1, layout.ep),
        "--global-batch-size": (args.global_batch_size, args.micro_batch_size * layout.dp),
        "--num-attention-heads": (args.num_attention_heads, layout.tp),
        "--ffn-hidden-size": (args.ffn_hidden_size, layout.tp),
        "--num-layers": (args.num_layers, layout.pp),
        "--seq-length": (args.seq_length, 2 * layout.cp if layout.cp > 1 else 1),
        "the padded vocabulary's multiple": (multiple, layout.tp),
    }
    if getattr(args, "group_query_attention", False):
        divided["--num-query-groups"] = (args.num_query_groups, layout.tp)
    for name, (size, parts) in divided.items():
        if size % parts:
            return f"{flag}: {name} {size} cannot be divided by {parts}"
    return ""


def described(layout: Layout) -> str:
    """A report's description of a reference in this layout."""
    return (
        f"reference: {layout} on {layout.ranks} ranks, itself checked against one device on a "
        "shrunk job"
    )


def notice(layout: Layout, args: Any) -> str:
    """The same, with the axes that it shares with a candidate with these arguments."""
    both = [
        f"{name}={size}"
        for name, option in _OPTIONS.items()
        if (size := getattr(args, option)) > 1 and size == getattr(layout, name)
    ]
    if not both:
        return described(layout)
    return (
        f"{described(layout)}; both runs have {' '.join(both)}: its faults that only the full size "
        "shows are not seen"
    )


def decoded(value: Any) -> Layout | None:
    """The layout in a reference's ``meta.json``; ``None``: one device. May raise ``CodecError``."""
    return None if value is None else codec.decode(Layout, value)
