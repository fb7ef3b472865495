# SPDX-License-Identifier: Apache-2.0
"""Which versions of megatron-core this package was built and tested for."""

import contextlib
import importlib.util
import inspect
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron_ttrace.trace.errors import TTraceError

SUPPORTED = ("0.18.2", "0.19.2")
"""The newest patch releases of the last two series."""
MAIN = "0.20.0"
"""What Megatron-LM's branch ``main`` calls itself."""
MAIN_COMMIT = "d98e8a64ddf3"
"""The commit of ``main`` that was tried, of 2026-08-22."""
KNOWN = (*SUPPORTED, MAIN)
"""What is checked and patched: versions of the series of one of these."""
_CONSTANT = re.compile(r"^(MAJOR|MINOR|PATCH|PRE_RELEASE) *= *['\"]?(\w{0,9})", re.MULTILINE)


def megatron_core_version() -> str:
    """The version of the Megatron that would be imported; that takes seconds, and is not done.

    A Megatron-LM checkout on ``PYTHONPATH`` shadows an installed wheel, so the package itself is
    read and not the metadata.

    Raises:
        ImportError: when there is none.
    """
    package = sys.modules.get("megatron.core")
    spec = getattr(package, "__spec__", None) or importlib.util.find_spec("megatron.core")
    if spec is None or spec.origin is None:
        raise ImportError("no module named megatron.core")
    version = version_in(Path(spec.origin).with_name("package_info.py").read_text("utf-8"))
    if not version:  # a fork that computes it
        from megatron.core.package_info import __version__

        version = str(__version__).partition("+")[0]
    return version


def version_in(package_info: str) -> str:
    """The version that the text of megatron/core/package_info.py states; empty if it has none.

    What Megatron appends after a ``+`` is left out: it is the commit of whatever git repository
    lies around it, for an environment inside a project that project's.
    """
    constants = dict(_CONSTANT.findall(package_info))
    if not {"MAJOR", "MINOR", "PATCH"} <= constants.keys():
        return ""
    major, minor, patch = (constants[name] for name in ("MAJOR", "MINOR", "PATCH"))
    return f"{major}.{minor}.{patch}{constants.get('PRE_RELEASE', '')}"


def series(version: str) -> str:
    """``0.19`` of ``0.19.1``."""
    return ".".join(version.split(".")[:2])


def known_as(version: str) -> str | None:
    """The version in ``KNOWN`` of the same series; ``None`` if there is none."""
    return next((known for known in KNOWN if series(known) == series(version)), None)


def refusal(version: str) -> str:
    """Why nothing is done with a version that is not of a known series."""
    return f"megatron-core {version} is not supported: use one of {', '.join(KNOWN)}"


def check_supported() -> None:
    """Refuse a Megatron whose internals were never tried.

    Raises:
        TTraceError: when megatron-core is absent or of another release series.
    """
    try:
        version = megatron_core_version()
    except ImportError as error:
        raise TTraceError(
            "megatron-core is not installed: pip install 'megatron-core==0.19.2'"
        ) from error
    if known_as(version) is None:
        raise TTraceError(refusal(version))


def unreleased(version: str) -> str:
    """What to know of a version that was tried before its release; empty for a release."""
    if series(version) != series(MAIN):
        return ""
    return f"megatron-core {version} was tried as Megatron-LM's main at commit {MAIN_COMMIT} only"


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Import Megatron without warnings of missing packages, which ``ttrace doctor`` reports.

    Later warnings, in training, are shown.
    """
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def call_known(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` with those keywords that this release of Megatron knows."""
    parameters = inspect.signature(function).parameters
    return function(*args, **{key: value for key, value in kwargs.items() if key in parameters})
