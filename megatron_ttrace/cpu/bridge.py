# SPDX-License-Identifier: Apache-2.0
"""What Megatron-Bridge needs beside Megatron; nothing happens where it is not installed.

*transformers* asks once what it can use of the machine and of other packages: before ``torch.cuda``
claims a GPU, and before modules stand in for packages of kernels, of which it would want functions
that Megatron does not use. NVIDIA's resiliency extension is imported for an annotation, adapters
(LoRA) ask the installed package for TransformerEngine's version, and Gemma 2 uses FlexAttention.
"""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from typing import Any

from megatron_ttrace.cpu import te
from megatron_ttrace.cpu.operators.flex_attention import flex_attention
from megatron_ttrace.cpu.stand_in import offer

_EXTENSION = "nvidia_resiliency_ext"


def installed() -> bool:
    """Whether ``megatron.bridge`` can be imported."""
    try:
        return importlib.util.find_spec("megatron.bridge") is not None
    except ModuleNotFoundError:  # no megatron at all
        return False


def settle() -> None:
    """Let ``transformers`` find out what there is, while it is true."""
    if not installed():
        return
    questions = vars(importlib.import_module("transformers.utils.import_utils"))
    for question in list(questions.values()):
        # Those that take a version are asked with it, and look at installed packages only.
        if hasattr(question, "cache_clear") and not inspect.signature(question).parameters:
            question()


class CallWrapper:
    """Restarts a training function within its process; without the extension nothing does."""


def install() -> None:
    """Offer the extension's modules unless it is installed, and the emulation's version."""
    if not installed():
        return
    torch_flex: Any = importlib.import_module("torch.nn.attention.flex_attention")
    torch_flex.flex_attention = flex_attention
    if te.emulated():
        sys.meta_path.append(_Emulated())
    if importlib.util.find_spec(_EXTENSION) is None:
        # Below the version from which Megatron uses it.
        offer(_EXTENSION, {"__version__": "0.0.0"})
        offer(f"{_EXTENSION}.inprocess", {CallWrapper.__name__: CallWrapper})


class _Emulated(DistributionFinder):
    """Finds the version of the TransformerEngine that is emulated."""

    def find_spec(self, *_: object) -> None:
        """Modules are offered already."""

    def find_distributions(
        self, context: DistributionFinder.Context | None = None
    ) -> Iterator[Distribution]:
        """The package, if that is what is looked for."""
        if ((context and context.name) or "").replace("_", "-") == "transformer-engine":
            yield _Engine()


class _Engine(Distribution):
    """As far as its version is read."""

    def read_text(self, filename: str) -> str | None:
        """Its metadata."""
        if filename != "METADATA":
            return None
        return f"Name: transformer-engine\nVersion: {te.releases.current()}\n"

    def locate_file(self, path: object) -> Path:
        """There are none."""
        return Path(str(path))
