# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's ``DotProductAttention``."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from megatron_ttrace.cpu.te import context_parallel
from megatron_ttrace.cpu.te.attention_core import AttentionSettings, FusedAttention, Ring
from megatron_ttrace.cpu.te.base import TransformerEngineBaseModule
from megatron_ttrace.cpu.te.masks import CAUSAL, MaskRule, Tokens
from megatron_ttrace.cpu.te.parallel import all_reduce, group_size

_TO_BHSD = {"sbhd": (1, 2, 0, 3), "bshd": (0, 2, 1, 3)}
_FROM_BHSD = {"sbhd": (2, 0, 1, 3), "bshd": (0, 2, 1, 3)}


def to_bhsd(tensor: torch.Tensor, qkv_format: str) -> torch.Tensor:
    """``sbhd``, ``bshd`` or ``thd`` as ``[b, h, s, d]``; packed sequences are a batch of one."""
    if qkv_format == "thd":
        return tensor.transpose(0, 1)[None]
    return tensor.permute(_TO_BHSD[qkv_format])


def from_bhsd(tensor: torch.Tensor, qkv_format: str) -> torch.Tensor:
    """``[b, h, s, d]`` in ``qkv_format`` with heads joined: ``[s, b, h * d]`` for ``sbhd``."""
    if qkv_format == "thd":
        return tensor[0].transpose(0, 1).flatten(-2)
    return tensor.permute(_FROM_BHSD[qkv_format]).flatten(-2)


class DotProductAttention(TransformerEngineBaseModule):
    """Scaled dot-product attention with grouped heads, windows, sinks and context parallelism."""

    softmax_offset: torch.Tensor | None

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool | None = False,
        bottom_right_diagonal: bool | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        _refuse(bottom_right_diagonal=bottom_right_diagonal)
        self.qkv_format = qkv_format
        self.attn_mask_type = attn_mask_type
        self.window_size = window_size
        self.tp_group, self.tp_size = tp_group, tp_size
        self.sequence_parallel = sequence_parallel
        self.get_rng_state_tracker = get_rng_state_tracker
        self.num_attention_heads = num_attention_heads
        self.num_gqa_groups = num_gqa_groups or num_attention_heads
        self.attention_dropout = attention_dropout
        self.layer_number = 1 if layer_number is None else layer_number
        channels = kv_channels if isinstance(kv_channels, int) else kv_channels[0]
        self.softmax_scale = 1 / math.sqrt(channels) if softmax_scale is None else softmax_scale
        self.softmax_type = softmax_type
        self.return_max_logit = bool(return_max_logit)
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)
        self._add_sinks(num_attention_heads // tp_size)

    def _add_sinks(self, heads: int) -> None:
        if self.softmax_type not in ("vanilla", "off-by-one", "learnable"):
            raise ValueError(f"softmax type {self.softmax_type}")
        if self.softmax_type == "learnable":
            zeros = torch.nn.init.zeros_
            self.add_parameter(
                "softmax_offset", (heads,), torch.float32, "cpu", zeros, tracked=True
            )
        else:
            self.softmax_offset = torch.zeros(heads) if self.softmax_type != "vanilla" else None

    def set_context_parallel_group(
        self,
        cp_group: Any,
        cp_global_ranks: list[int] | None,
        cp_stream: Any,
        cp_comm_type: str = "p2p",
    ) -> None:
        """Set over which ranks the sequence is cut, and how they communicate."""
        self.cp_group, self.cp_comm_type = cp_group, cp_comm_type
        self.cp_global_ranks, self.cp_stream = cp_global_ranks, cp_stream

    def _draw_mask(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        # The named random state differs between tensor-parallel ranks, as their heads do.
        tracker = self.get_rng_state_tracker() if self.get_rng_state_tracker else None
        keep = 1.0 - self.attention_dropout
        with tracker.fork() if tracker is not None else nullcontext():
            return torch.empty(shape, dtype=dtype).bernoulli_(keep).div_(keep)

    def _rule(
        self, kind: str | None, window: tuple[int, int] | None, queries: int, keys: int
    ) -> MaskRule:
        kind = self.attn_mask_type if kind is None else kind
        window = self.window_size if window is None else window
        bottom_right = kind.endswith("bottom_right") or kind not in CAUSAL
        return MaskRule(
            kind,
            (-1, -1) if window is None else (int(window[0]), int(window[1])),
            keys - queries if bottom_right else 0,
        )

    def forward(
        self,
        query_layer: torch.Tensor,
        key_layer: torch.Tensor,
        value_layer: torch.Tensor,
        attention_mask: Any = None,
        qkv_format: str | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        pad_between_seqs: bool | None = None,
        num_splits: int | None = 1,
        **unsupported: Any,
    ) -> Any:
        """``[sq, b, h, d]``, ``[sk, b, g, d]``, ``[sk, b, g, dv]`` to ``[sq, b, h * dv]``.

        ``bshd`` and ``thd`` likewise. With ``return_max_logit`` also each head's largest score.
        """
        _refuse(**unsupported)
        qkv_format = qkv_format or self.qkv_format
        q, k, v = (to_bhsd(t, qkv_format) for t in (query_layer, key_layer, value_layer))
        rule = self._rule(attn_mask_type, window_size, q.shape[2], k.shape[2])
        if core_attention_bias_type not in ("no_bias", "post_scale_bias"):
            raise NotImplementedError(f"attention bias of type {core_attention_bias_type}")
        settings = AttentionSettings(
            scale=self.softmax_scale,
            rule=rule,
            hidden=_hidden(rule.kind, attention_mask, qkv_format),
            draw_mask=self._draw_mask if self.training and self.attention_dropout > 0 else None,
        )
        padded_q = cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded
        padded_kv = cu_seqlens_kv if cu_seqlens_kv_padded is None else cu_seqlens_kv_padded
        tensors = (q, k, v, core_attention_bias, self.softmax_offset)
        if context_parallel.needed(self.cp_group):
            out, max_score = context_parallel.attention(
                *tensors,
                settings,
                self.cp_group,
                self.cp_comm_type,
                padded_q if qkv_format == "thd" else None,
            )
        else:
            queries, keys = (
                (_packed(padded_q, q.shape[2]), _packed(padded_kv, k.shape[2]))
                if qkv_format == "thd"
                else (Tokens.whole(q.shape[2]), Tokens.whole(k.shape[2]))
            )
            allowed = [rule.allowed(queries, keys)]
            out, max_score = FusedAttention.apply(*tensors, allowed, settings, Ring())
        output = from_bhsd(out, qkv_format)
        if not self.return_max_logit:
            return output
        for group in context_parallel.groups(self.cp_group):
            if group_size(group) > 1:
                max_score = all_reduce(max_score, group, torch.distributed.ReduceOp.MAX)
        return output, max_score


def _refuse(**arguments: Any) -> None:
    """Refuse arguments that TransformerEngine takes, and this does not."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"attention with {name} on a CPU")


def _packed(cu_seqlens: torch.Tensor | None, length: int) -> Tokens:
    if cu_seqlens is None:
        raise ValueError("packed sequences need cu_seqlens")
    return context_parallel.packed_tokens(cu_seqlens, length)


def _hidden(kind: str, attention_mask: Any, qkv_format: str) -> torch.Tensor | None:
    """Return the mask argument, True where a key is hidden, if the mask type makes use of it."""
    uses_mask = kind == "arbitrary" or kind.startswith("padding")
    if not uses_mask or attention_mask is None or qkv_format == "thd":
        return None
    if isinstance(attention_mask, tuple):
        # Cross attention: the queries' mask and the keys'; only hidden keys matter.
        attention_mask = attention_mask[1]
    mask: torch.Tensor = attention_mask
    return mask.bool()
