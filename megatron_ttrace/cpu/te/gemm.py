# SPDX-License-Identifier: Apache-2.0
"""``transformer_engine.pytorch.cpp_extensions``: a matrix product whose result has its own dtype.

Megatron calls it for routers' scores (megatron/core/transformer/moe/moe_utils.py), for logits
(``--output-logit-dtype``), and for gradients of weights in shards
(megatron/core/tensor_parallel/layers.py).
"""

from typing import Any

import torch

_WITHOUT_EFFECT = {"use_split_accumulator", "workspace"}
"""Arguments that concern only how a GPU computes."""


def general_gemm(
    A: torch.Tensor,  # noqa: N803 - TransformerEngine's name
    B: torch.Tensor,  # noqa: N803
    *,
    out_dtype: torch.dtype | None = None,
    layout: str = "TN",
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    grad: bool = False,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
    """``B A`` with sums in float32, each matrix transposed where ``layout`` has a ``T``.

    ``layout`` names A first: of a linear layer with weight A and input B, ``"TN"`` is the output.

    Raises:
        NotImplementedError: for what Megatron does not ask for.
    """
    unknown = {name for name, value in others.items() if value not in (None, False)}
    unknown -= _WITHOUT_EFFECT
    if grad and bias is not None:
        unknown.add("bias")
    if unknown:
        raise NotImplementedError(f"general_gemm: {', '.join(sorted(unknown))}")
    left, right = (
        matrix.float().mT if letter == "T" else matrix.float()
        for matrix, letter in zip((B, A), reversed(layout), strict=True)
    )
    product = left @ right
    if bias is not None:
        product = product + bias
    product = product.to(out_dtype or A.dtype)
    return product if out is None else out.copy_(product), None, None, None
