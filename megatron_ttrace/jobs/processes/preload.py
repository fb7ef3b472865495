# SPDX-License-Identifier: Apache-2.0
"""What every rank of a job imports and computes of Megatron's before it trains.

A process that ranks are forked from does it once for all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import io
from collections.abc import Sequence
from typing import Any

_MODULES = (
    "megatron.training.training",
    "megatron.core.models.gpt",
    # Megatron imports these while a job starts.
    "megatron.core.datasets.blended_megatron_dataset_builder",
    "megatron.core.models.mimo",
    "megatron.core.tokenizers.text",
)
OURS = (
    "megatron_ttrace.run.candidate",
    "megatron_ttrace.run.entry",
    "megatron_ttrace.run.injection",
    "megatron_ttrace.run.loop",
    "megatron_ttrace.run.reference_run",
    "torch._dynamo",  # optimizers import it, for a decorator
)
"""What a rank imports for a check; this room imports none of it itself."""


def preload() -> None:
    """Import the modules; a release that lacks one, or has it behind a dependency, does without."""
    for name in _MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    _remember_help_texts()


def accepts(arguments: Sequence[str]) -> bool:
    """Whether Megatron's parser accepts arguments; some that it does not may be the script's own.

    It decides nothing but whether it is worth the time to import more before the ranks start.
    """
    parser = _remember_help_texts()
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        try:
            return not parser.parse_known_args(list(arguments))[1]
        except SystemExit:
            return False


@functools.cache
def _remember_help_texts() -> argparse.ArgumentParser:
    """Megatron parses its own source for the help texts of its flags, twice in each rank."""
    from megatron.training import argument_utils, arguments

    factory: Any = argument_utils.ArgumentGroupFactory
    parse = factory._get_field_docstrings
    remembered = functools.cache(lambda config: parse(factory, config))
    factory._get_field_docstrings = staticmethod(remembered)
    parser: argparse.ArgumentParser = arguments.add_megatron_arguments(
        argparse.ArgumentParser(allow_abbrev=False)
    )
    return parser
