# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule and what goes with it (``flash-linear-attention``, module ``fla``).

Per head, with a state ``S`` [keys, values] (arXiv 2412.06464)::

    S    = exp(g[t]) S
    S    = S + k[t] (beta[t] (v[t] - S^T k[t]))^T
    o[t] = scale S^T q[t]

computed step by step in float32.
"""

from itertools import pairwise
from typing import Any

import torch

from megatron_ttrace.cpu.autocast import kernel
from megatron_ttrace.cpu.operators.conv1d import causal_conv1d_fn


@kernel
def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """The recurrence; the result is like ``v``, and ``None``.

    ``q`` and ``k`` are [batch, length, key heads, keys], ``v`` is [batch, length, heads, values]
    with a multiple of the key heads; ``g``, logarithms of the decay, and ``beta`` are [batch,
    length, heads]. ``scale`` is ``keys ** -0.5`` by default. A state is carried only within
    one of the packed sequences, whose bounds are ``cu_seqlens`` [sequences + 1].

    Raises:
        NotImplementedError: for states, which inference alone uses, and options that Megatron does
            not use.
    """
    if initial_state is not None or output_final_state:
        raise NotImplementedError("states of gated delta nets are for inference")
    if any(value is not None and value is not False for value in more.values()):
        raise NotImplementedError(f"chunk_gated_delta_rule: {', '.join(more)}")
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    repeats = v.shape[2] // q.shape[2]
    queries, keys = (tensor.float().repeat_interleave(repeats, dim=2) for tensor in (q, k))
    queries = queries * (q.shape[-1] ** -0.5 if scale is None else scale)
    inputs = (queries, keys, v.float(), g.float(), beta.float())
    bounds = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    outputs = []
    for start, end in pairwise(bounds):
        if start == end:
            continue  # bounds that are filled up to a fixed number
        state = v.new_zeros(q.shape[0], v.shape[2], q.shape[3], v.shape[3], dtype=torch.float32)
        outputs.append(_sequence([tensor[:, start:end] for tensor in inputs], state))
    return torch.cat(outputs, dim=1).to(v.dtype), None


def _sequence(inputs: list[torch.Tensor], state: torch.Tensor) -> torch.Tensor:
    outputs = []
    for query, key, value, decay, rate in zip(
        *(tensor.unbind(1) for tensor in inputs), strict=True
    ):
        state = state * decay.exp()[..., None, None]
        error = (value - (state * key[..., None]).sum(dim=-2)) * rate[..., None]
        state = state + key[..., None] * error[..., None, :]
        outputs.append((state * query[..., None]).sum(dim=-2))
    return torch.stack(outputs, dim=1)


def l2norm(
    x: torch.Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """``x / sqrt(sum(x**2) + eps)`` over the last dim."""
    values = x.float()
    normed = values * torch.rsqrt(values.square().sum(dim=-1, keepdim=True) + eps)
    return normed.to(x.dtype if output_dtype is None else output_dtype)


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    backend: str | None = "triton",
    cu_seqlens: torch.Tensor | None = None,
    **more: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Causal convolution of [batch, length, channels] with [channels, width].

    Returns:
        The result, and ``None``.

    Raises:
        NotImplementedError: for states, which inference alone uses, and options that Megatron does
            not use.
    """
    if weight is None or initial_state is not None or output_final_state or more:
        raise NotImplementedError("causal_conv1d: states are not implemented on a CPU")
    numbers = None
    if cu_seqlens is not None:
        lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
        numbers = torch.repeat_interleave(torch.arange(len(lengths), device=x.device), lengths)
        numbers = numbers.expand(x.shape[0], -1)
    out = causal_conv1d_fn(
        x.transpose(1, 2), weight, bias, seq_idx=numbers, activation=activation
    ).transpose(1, 2)
    return (out if residual is None else out + residual), None
