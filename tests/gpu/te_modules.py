# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's modules with given parameters and inputs: what they compute is written.

``python -m tests.gpu.te_modules cpu FILE`` uses the emulation, ``cuda`` the real ones. Parameters,
inputs and output gradients come from the module's case alone, so both compute the same.
"""

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from megatron_ttrace.compare.tolerance import epsilon

SEQUENCE, BATCH, HIDDEN, HEADS = 64, 2, 128, 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_FEATURES: dict[str, Any] = {"in_features": HIDDEN, "out_features": 256}
_ATTENTION = {"num_attention_heads": HEADS, "kv_channels": HIDDEN // HEADS}
CASES = {
    "Linear": ("Linear", _FEATURES),
    "LayerNormLinear": ("LayerNormLinear", _FEATURES),
    "LayerNormLinear, RMSNorm": ("LayerNormLinear", {**_FEATURES, "normalization": "RMSNorm"}),
    "GroupedLinear": ("GroupedLinear", {**_FEATURES, "num_gemms": 2}),
    "LayerNorm": ("LayerNorm", {"normalized_shape": HIDDEN}),
    "RMSNorm": ("RMSNorm", {"normalized_shape": HIDDEN}),
    "DotProductAttention": ("DotProductAttention", _ATTENTION),
    "DotProductAttention, grouped": ("DotProductAttention", {**_ATTENTION, "num_gqa_groups": 2}),
}
PRODUCTS = ("Linear", "LayerNormLinear", "GroupedLinear")
PRECISIONS = ("fp32", "bf16", "fp8-delayed", "fp8-tensorwise")


def drawn(*shape: int, seed: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Normal numbers, drawn on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def inputs_of(kind: str, arguments: dict[str, Any], dtype: torch.dtype, device: str) -> Any:
    """A module's tensors, and its further arguments."""
    if kind == "DotProductAttention":
        groups = arguments.get("num_gqa_groups", HEADS)
        sizes = (HEADS, groups, groups)
        shapes = [(SEQUENCE, BATCH, heads, HIDDEN // HEADS) for heads in sizes]
    elif kind == "GroupedLinear":
        shapes = [(SEQUENCE * BATCH, HIDDEN)]
    else:
        shapes = [(SEQUENCE, BATCH, HIDDEN)]
    tensors = [
        drawn(*shape, seed=number, dtype=dtype, device=device).requires_grad_()
        for number, shape in enumerate(shapes)
    ]
    more = [[SEQUENCE * BATCH // 2] * 2] if kind == "GroupedLinear" else []
    return tensors, more


def computed(device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and value of everything that the modules give."""
    if device == "cpu":
        from megatron_ttrace.cpu.te import offering

        offering.real_present = lambda: False  # type: ignore[assignment]
        offering.install()
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    recipes = {
        "fp8-delayed": lambda: recipe.DelayedScaling(),
        "fp8-tensorwise": lambda: recipe.Float8CurrentScaling(),
    }
    for case, (kind, arguments) in CASES.items():
        for precision in PRECISIONS:
            if precision in recipes and kind not in PRODUCTS:
                continue
            dtype = DTYPES.get(precision, torch.bfloat16)
            if kind == "DotProductAttention":
                module = te.DotProductAttention(**arguments)
            else:
                module = getattr(te, kind)(**arguments, params_dtype=dtype, device=device)
            with torch.no_grad():
                for number, parameter in enumerate(module.parameters()):
                    values = drawn(*parameter.shape, seed=10 + number, dtype=dtype, device=device)
                    parameter.copy_(values * 0.1 + (parameter.ndim == 1))
            tensors, more = inputs_of(kind, arguments, dtype, device)
            quantised = (
                te.fp8_autocast(enabled=True, fp8_recipe=recipes[precision]())
                if precision in recipes
                else nullcontext()
            )
            with quantised:
                output = module(*tensors, *more)
            name = f"{case}|{precision}"
            yield f"{name}|output", output
            output.backward(drawn(*output.shape, seed=99, dtype=output.dtype, device=device))
            for number, tensor in enumerate(tensors):
                yield f"{name}|grad_input {number}", tensor.grad
            for parameter_name, parameter in module.named_parameters():
                yield f"{name}|grad {parameter_name}", parameter.grad


def compare(emulated: Path, real: Path) -> list[list[Any]]:
    """Rows of a table: module, precision, tensor, relative error in the precision's epsilons."""
    ours, theirs = load_file(emulated), load_file(real)
    assert set(ours) == set(theirs), sorted(set(ours) ^ set(theirs))
    rows = []
    for name, tensor in ours.items():
        case, precision, what = name.split("|")
        there = theirs[name].double()
        error = float((tensor.double() - there).norm() / there.norm().clamp_min(1e-300))
        step = epsilon(DTYPES.get(precision, torch.bfloat16))
        rows.append([case, precision, what, round(error / step, 3)])
    return rows


if __name__ == "__main__":
    where, target = sys.argv[1:]
    save_file({name: one.detach().cpu().contiguous() for name, one in computed(where)}, target)
