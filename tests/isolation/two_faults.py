# SPDX-License-Identifier: Apache-2.0
"""A training script with two faults in the candidate: linear layers of layer 0 and layer 1."""

import runpy
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[2] / "launch" / "pretrain_gpt.py"


def spoil(kind: type, layer: int, leaf: str) -> None:
    """Make the output of one module one percent too large."""
    original = kind.forward  # type: ignore[attr-defined]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        if not getattr(self, "is_spoilt", False):
            return output
        if isinstance(output, tuple):
            return (output[0] * 1.01, *output[1:])
        return output * 1.01

    def mark(model: Any) -> None:
        for name, module in model.named_modules():
            if name.endswith(f"layers.{layer}.{leaf}"):
                module.is_spoilt = True

    kind.forward = forward  # type: ignore[attr-defined]
    MARKS.append(mark)


MARKS: list[Any] = []


def main() -> None:
    if "reference" not in sys.argv:
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

        import megatron_ttrace  # noqa: F401

        spoil(ColumnParallelLinear, 0, "self_attention.linear_qkv")
        spoil(RowParallelLinear, 1, "mlp.linear_fc2")
        built = GPTModel.__init__

        def build(self: Any, *args: Any, **kwargs: Any) -> None:
            built(self, *args, **kwargs)
            for mark in MARKS:
                mark(self)

        GPTModel.__init__ = build
    sys.path.insert(0, str(SCRIPT.parent))
    runpy.run_path(str(SCRIPT), run_name="__main__")


if __name__ == "__main__":
    main()
