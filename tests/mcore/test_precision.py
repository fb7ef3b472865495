# SPDX-License-Identifier: Apache-2.0
"""The dtypes of reductions, from arguments that Megatron validated."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_ttrace.mcore.precision import reduced_in

FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("given", "gradients"),
    [
        ({"accumulate_allreduce_grads_in_fp32": True}, "float32"),
        ({"accumulate_allreduce_grads_in_fp32": False}, "bfloat16"),
        ({"use_torch_fsdp2": True, "accumulate_allreduce_grads_in_fp32": True}, ""),
        ({"use_megatron_fsdp": True, "megatron_fsdp_main_grads_dtype": FP32}, "float32"),
        (
            {
                "use_megatron_fsdp": True,
                "megatron_fsdp_main_grads_dtype": FP32,
                "megatron_fsdp_grad_comm_dtype": BF16,
            },
            "bfloat16",
        ),
        ({"use_megatron_fsdp": True, "accumulate_allreduce_grads_in_fp32": True}, ""),
    ],
)
def test_gradients(given: dict[str, object], gradients: str) -> None:
    """Of each kind of data parallelism; the compute dtype is the model's."""
    args = SimpleNamespace(bf16=True, params_dtype=BF16, **given)
    assert reduced_in(args) == ("bfloat16", gradients)  # type: ignore[arg-type]


def test_single_precision() -> None:
    """Without a half precision, everything is in float32."""
    assert reduced_in(SimpleNamespace(bf16=False, params_dtype=FP32)) == (  # type: ignore[arg-type]
        *("float32", "float32"),
    )
