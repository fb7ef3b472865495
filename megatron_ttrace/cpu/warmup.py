# SPDX-License-Identifier: Apache-2.0
"""Megatron's warm-up of compiled functions is left out: nothing is compiled.

It runs the fused functions on random inputs whose sizes depend on the tensor-parallel size. On a
GPU that moves the CUDA generator only. Here the CUDA generator is the CPU's, so the warm-up would
make ``--use-cpu-initialization``, which gives all layouts the same weights, depend on the layout.
"""

import importlib
from typing import Any


def skip() -> None:
    """Make ``set_jit_fusion_options`` set its options without the warm-up."""
    initialize: Any = importlib.import_module("megatron.training.initialize")
    initialize._warmup_jit_function = lambda *args, **kwargs: None
