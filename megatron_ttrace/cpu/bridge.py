# SPDX-License-Identifier: Apache-2.0
"""What Megatron-Bridge needs beside Megatron; nothing happens where it is not installed.

*transformers* asks once what it can use of the machine and of other packages. It is asked before
``torch.cuda`` claims a GPU and before modules stand in for packages of kernels, of which it would
want functions that Megatron does not use.

*NVIDIA's resiliency extension* watches GPUs. Megatron-Bridge imports it for an annotation.

*Its configuration* is adapted as a command line is (``arguments.py``): sub-configurations are
Megatron's own classes, so nearly all names are the same.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator
from typing import Any

from megatron_ttrace.cpu import arguments
from megatron_ttrace.cpu.stand_in import offer

_CONFIG = "megatron.bridge.training.config"
_UPDATE = "runtime_config_update"
_EXTENSION = "nvidia_resiliency_ext"
_RENAMED = {"num_experts": "num_moe_experts", "swiglu": "gated_linear_unit"}
"""Command line -> configuration."""


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
        if hasattr(question, "cache_clear") and not inspect.signature(question).parameters:
            question()


class CallWrapper:
    """Restarts a training function within its process; without the extension nothing does."""


def install() -> None:
    """Offer the extension's modules unless it is installed; adapt configurations."""
    if not installed():
        return
    sys.meta_path.insert(0, _Awaiting())
    if importlib.util.find_spec(_EXTENSION) is None:
        # Below the version from which Megatron uses it.
        offer(_EXTENSION, {"__version__": "0.0.0"})
        offer(f"{_EXTENSION}.inprocess", {CallWrapper.__name__: CallWrapper})


class _Awaiting:
    """Import hook: adapts configurations where Megatron-Bridge makes them final."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Called for every module to be imported; finds only that one."""
        del path, target
        if name != _CONFIG:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_wrap(module: Any) -> None:
            execute(module)
            setattr(module, _UPDATE, _adapting(getattr(module, _UPDATE)))

        loader.exec_module = execute_and_wrap
        return spec


def _adapting(update: Any) -> Any:
    @functools.wraps(update)
    def wrapper(config: Any) -> None:
        line = arguments.banner(adapt(config))
        if int(os.environ.get("RANK", "0")) == 0:
            print(line, flush=True)
        update(config)

    return wrapper


def adapt(config: Any) -> list[str]:
    """Switch off in a ``ConfigContainer`` what a CPU cannot do, before it is made final.

    Returns:
        Short names of what the user loses.
    """
    flat: Any = Flat(config)
    changes = arguments.adapt_arguments(flat)
    if hasattr(flat, "persistent_workers"):
        flat.persistent_workers = False  # there are none
    # Imported by name, before it was replaced.
    initialize: Any = importlib.import_module("megatron.bridge.training.initialize")
    utils: Any = importlib.import_module("megatron.core.datasets.utils")
    initialize.compile_helpers = utils.compile_helpers
    # As arguments.py does for Megatron's own, and why.
    initialize._warmup_jit_function = lambda *args, **kwargs: None
    return changes


class Flat:
    """All sub-configurations as one namespace: the first that has a name is read, all are set."""

    def __init__(self, config: Any) -> None:
        parts = [part for part in vars(config).values() if hasattr(part, "__dataclass_fields__")]
        parts += [part.transformer for part in parts if hasattr(part, "transformer")]
        vars(self)["_parts"] = parts

    def _having(self, name: str) -> Iterator[tuple[Any, str]]:
        for word in (_RENAMED.get(name, name), name):
            having = [(part, word) for part in vars(self)["_parts"] if hasattr(part, word)]
            if having:
                return iter(having)
        return iter(())

    def __getattr__(self, name: str) -> Any:
        for part, word in self._having(name):
            return getattr(part, word)
        raise AttributeError(name)

    def __setattr__(self, name: str, value: Any) -> None:
        for part, word in self._having(name):
            setattr(part, word, value)
