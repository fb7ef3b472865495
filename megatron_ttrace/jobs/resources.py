# SPDX-License-Identifier: Apache-2.0
"""Files that are beside the package in a checkout and inside it in a wheel."""

from pathlib import Path

from megatron_ttrace.trace.errors import TTraceError

_PACKAGE = Path(__file__).resolve().parents[1]


def patches_dir() -> Path:
    """Patches for code that is not ours, one folder per project."""
    return _find("patches")


def launch_dir() -> Path:
    """Scripts that start a run, ``pretrain_gpt.py`` among them."""
    return _find("launch")


def _find(name: str) -> Path:
    # setup.py copies the folder to megatron_ttrace/_NAME when it builds a wheel. A checkout and an
    # editable install read the original.
    in_wheel = _PACKAGE / f"_{name}"
    in_checkout = _PACKAGE.parent / name
    for folder in (in_wheel, in_checkout):
        if folder.is_dir():
            return folder
    raise TTraceError(
        f"the {name} folder is missing from this installation: reinstall megatron-ttrace"
    )
