# SPDX-License-Identifier: Apache-2.0
"""Causal convolution over a sequence, one filter per channel (``causal_conv1d``)."""

from typing import Any, NoReturn

import torch
import torch.nn.functional as F


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """``out[t] = act(bias + sum_k weight[k] x[t - width + 1 + k])``, in float32.

    ``x`` is [batch, channels, length], ``weight`` [channels, width] and ``bias`` [channels]. What
    lies in another sequence by ``seq_idx`` [batch, length] is zero; ``initial_states`` [batch,
    channels, width - 1] come before the first position. ``activation``: ``"silu"`` or ``"swish"``
    (the same).

    Raises:
        NotImplementedError: for another activation.
    """
    if activation not in (None, "silu", "swish"):
        raise NotImplementedError("activation must be None, silu, or swish")
    width, length = weight.shape[1], x.shape[2]
    before = x.new_zeros(*x.shape[:2], width - 1) if initial_states is None else initial_states
    padded = torch.cat([before.to(x.dtype), x], dim=2).float()
    numbers = None
    if seq_idx is not None:
        numbers = F.pad(seq_idx, (width - 1, 0), value=-1)
    out = padded.new_zeros(x.shape)
    for tap in range(width):
        term = padded[:, :, tap : tap + length] * weight[:, tap, None].float()
        if numbers is not None and seq_idx is not None:
            term = term * (numbers[:, tap : tap + length] == seq_idx)[:, None, :]
        out = out + term
    if bias is not None:
        out = out + bias.float()[:, None]
    return (out if activation is None else F.silu(out)).to(x.dtype)


def causal_conv1d_varlen_states(*args: Any, **kwargs: Any) -> NoReturn:
    """Only the name, which Megatron imports beside the convolution.

    Raises:
        NotImplementedError: always: inference alone uses states.
    """
    raise NotImplementedError("states of a convolution are for inference")
