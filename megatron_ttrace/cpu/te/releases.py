# SPDX-License-Identifier: Apache-2.0
"""Which release of TransformerEngine is emulated: one that has all that a Megatron release can use.

These releases compute alike, but for the cross entropy. What 2.17 added (``score_mod``,
``routing_map_format``) no supported Megatron passes.
"""

import functools
import importlib.util
import re
from pathlib import Path

#: Series of Megatron, and the release that it was built with: ``transformer-engine`` under
#: ``tool.uv.sources`` in Megatron's pyproject.toml (its uv.lock has the version).
PINNED = {
    # core_v0.18.2, pyproject.toml:206: b9d690e0, nine commits after v2.16; calls itself 2.16.0.
    "0.18": "2.16.0",
    # core_v0.19.0, pyproject.toml:234: 4329ff84, the tag v2.17.1; but weights in shards need
    # 2.19.0.dev0 (megatron/core/tensor_parallel/generalized_tensor_parallelism.py:43).
    "0.19": "2.19.0.dev0",
    # main at d98e8a64: the same as 0.19.
    "0.20": "2.19.0.dev0",
}


@functools.cache
def current() -> str:
    """Return the release that is emulated; without a Megatron, the one of 0.19."""
    return PINNED.get(_megatron_series(), PINNED["0.19"])


def is_before(major: int, minor: int) -> bool:
    """Whether the release that is emulated is older than this one."""
    return tuple(map(int, current().split(".")[:2])) < (major, minor)


def _megatron_series() -> str:
    """``0.19`` for the Megatron that would be imported; nothing of it is imported."""
    try:
        spec = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None:
        return ""
    try:
        text = Path(spec.origin).with_name("package_info.py").read_text(encoding="utf-8")
    except OSError:
        return ""
    parts = [re.search(rf"^{name} *= *([0-9]+)", text, re.MULTILINE) for name in ("MAJOR", "MINOR")]
    return ".".join(part[1] for part in parts if part)
