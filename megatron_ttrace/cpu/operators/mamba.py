# SPDX-License-Identifier: Apache-2.0
"""Mamba-2's state space operators (``mamba_ssm.ops.triton``).

Per head, with a state ``h`` [headdim, dstate] (arXiv 2405.21060)::

    h[t] = exp(dt[t] A) h[t-1] + dt[t] x[t] B[t]^T
    y[t] = h[t] C[t] + D x[t]

As the kernels do, a chunk is computed by matrix products and the state is carried from chunk to
chunk. All of it is float32; the state that is carried has a dtype of its own.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F

from megatron_ttrace.cpu.autocast import kernel
from megatron_ttrace.cpu.operators.conv1d import causal_conv1d_fn


@kernel
def mamba_chunk_scan_combined(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    dt_softplus: bool = False,
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    state_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The scan of ``x`` [batch, length, heads, headdim]; the result is like it.

    ``dt`` is [batch, length, heads], to which ``dt_bias`` [heads] is added and perhaps ``softplus``
    applied; ``A`` [heads] is negative; ``B`` and ``C`` are [batch, length, groups, dstate]. ``D``
    [heads] or [heads, headdim] is the direct share of the input, and the output is multiplied by
    ``silu(z)``. A state is carried only within one of the sequences that ``seq_idx`` [batch,
    length] numbers, from a chunk of ``chunk_size`` positions to the next in ``state_dtype``
    (float32).

    Raises:
        NotImplementedError: for states that are passed or returned, which inference alone uses.
    """
    is_returned = return_final_states or return_varlen_states
    if is_returned or cu_seqlens is not None or initial_states is not None:
        raise NotImplementedError("states of Mamba layers are for inference")
    batch, length, heads, _ = x.shape
    steps = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    steps = F.softplus(steps) if dt_softplus else steps
    repeats = heads // B.shape[2]
    values = x.float() * steps[..., None]
    keys, queries = (tensor.float().repeat_interleave(repeats, dim=2) for tensor in (B, C))
    decay = steps * A.float()
    state = x.new_zeros(batch, heads, x.shape[3], B.shape[3], dtype=torch.float32)
    numbers = seq_idx if seq_idx is not None else decay.new_zeros(batch, length)
    carried = numbers[:, 0]
    parts = []
    for start in range(0, length, chunk_size):
        at = slice(start, start + chunk_size)
        part, state = _chunk(
            values[:, at], decay[:, at], keys[:, at], queries[:, at], state, numbers[:, at], carried
        )
        parts.append(part)
        carried = numbers[:, at][:, -1]
        if state_dtype is not None:
            state = state.to(state_dtype).float()
    y = torch.cat(parts, dim=1)
    if D is not None:
        y = y + x.float() * (D.float()[:, None] if D.dim() == 1 else D.float())
    if z is not None:
        y = y * F.silu(z.float())
    return y.to(x.dtype)


def _chunk(
    values: torch.Tensor,
    decay: torch.Tensor,
    keys: torch.Tensor,
    queries: torch.Tensor,
    state: torch.Tensor,
    numbers: torch.Tensor,
    carried: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of one chunk, and the state after it.

    ``values`` [batch, length, heads, headdim] are times ``dt``, ``decay`` [batch, length, heads] is
    the logarithm of the factor of a step, ``keys`` and ``queries`` are [batch, length, heads,
    dstate]. ``numbers`` [batch, length] are of sequences, and ``state`` belongs to ``carried``
    [batch].
    """
    total = decay.cumsum(dim=1)
    ages = total[:, :, None] - total[:, None]  # [batch, target, source, heads]
    seen = torch.ones(ages.shape[1], ages.shape[1], dtype=torch.bool, device=ages.device).tril()
    seen = seen[None] & (numbers[:, :, None] == numbers[:, None])
    weights = torch.exp(ages.masked_fill(~seen[..., None], -math.inf))
    scores = torch.einsum("bthn,bshn->btsh", queries, keys) * weights
    y = torch.einsum("btsh,bshp->bthp", scores, values)
    old = torch.exp(total) * (numbers == carried[:, None])[..., None]
    y = y + torch.einsum("bthn,bhpn->bthp", queries, state) * old[..., None]
    last = weights[:, -1]  # [batch, source, heads]
    state = state * old[:, -1, :, None, None]
    return y, state + torch.einsum("bsh,bshp,bshn->bhpn", last, values, keys)


@kernel
def mamba_split_conv1d_scan_combined(
    zxbcdt: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor | None,
    dt_bias: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    chunk_size: int,
    seq_idx: torch.Tensor | None = None,
    activation: str = "silu",
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    state_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Split, convolve, scan and gate.

    ``zxbcdt`` is [batch, length, 2 * dim + 2 * ngroups * dstate + heads]: gate, input, B, C, dt.
    ``conv1d_weight`` is [dim + 2 * ngroups * dstate, width], ``D`` [heads], then ``headdim`` must
    be given, or [heads, headdim]. ``norm_before_gate`` is about the kernel's own norm and
    projection, for which no supported Megatron passes weights. The others are those of
    :func:`mamba_chunk_scan_combined`.

    Returns:
        [batch, length, dim].
    """
    heads = D.shape[0]
    size = heads * (D.shape[1] if D.dim() == 2 else int(headdim or 0))
    state = (zxbcdt.shape[-1] - 2 * size - heads) // (2 * ngroups)
    z, mixed, dt = zxbcdt.split([size, size + 2 * ngroups * state, heads], dim=-1)
    convolved = causal_conv1d_fn(
        mixed.transpose(1, 2),
        conv1d_weight,
        conv1d_bias,
        seq_idx=seq_idx,
        activation=activation,
    ).transpose(1, 2)
    x, b, c = convolved.split([size, ngroups * state, ngroups * state], dim=-1)
    y = mamba_chunk_scan_combined(
        x.unflatten(-1, (heads, -1)),
        dt,
        A,
        b.unflatten(-1, (ngroups, -1)),
        c.unflatten(-1, (ngroups, -1)),
        chunk_size,
        D=D,
        z=z.unflatten(-1, (heads, -1)),
        dt_bias=dt_bias,
        seq_idx=seq_idx,
        dt_softplus=True,
        state_dtype=state_dtype,
    )
    return y.flatten(2)


class RMSNorm(torch.nn.Module):
    """``mamba_ssm.ops.triton.layernorm_gated.RMSNorm``: over groups of the last dim."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.group_size = group_size
        self.norm_before_gate = norm_before_gate

    def forward(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        """``x`` [..., hidden_size], gated by ``z`` if there is one, before or after the norm."""
        gated = x.float()
        if z is not None and not self.norm_before_gate:
            gated = gated * F.silu(z.float())
        groups = gated.unflatten(-1, (-1, self.group_size or x.shape[-1]))
        normed = groups * torch.rsqrt(groups.square().mean(dim=-1, keepdim=True) + self.eps)
        values: torch.Tensor = normed.flatten(-2) * self.weight.float()
        if z is not None and self.norm_before_gate:
            values = values * F.silu(z.float())
        return values.to(x.dtype)
