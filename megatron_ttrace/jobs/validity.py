# SPDX-License-Identifier: Apache-2.0
"""Whether Megatron accepts a job, decided by its own validation, without running it."""

import contextlib
import importlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from megatron_ttrace import cpu
from megatron_ttrace.jobs import script as scripts
from megatron_ttrace.mcore.versions import quiet_imports
from megatron_ttrace.trace.errors import reported


def prepare(script: Path) -> None:
    """Import the Megatron of a script, if this process has not (``jobs.job.prepare``).

    Raises ``TTraceError`` when it cannot be imported.
    """
    path = scripts.as_search_path(scripts.search_path(script))
    with path, quiet_imports(), reported("Megatron cannot be imported", ImportError):
        importlib.import_module("megatron.training.arguments")


def options(arguments: Sequence[str], ranks: int) -> dict[str, Any] | None:
    """A job's options; ``None`` if Megatron's validation or ``TransformerConfig`` refuses them.

    Flags that a script adds to the parser are not looked at.
    """
    from megatron.training import arguments as megatron

    silent = io.StringIO()
    with (
        mock.patch.dict(os.environ, RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(ranks)),
        mock.patch.object(sys, "argv", [sys.argv[0], *arguments]),
        quiet_imports(),
        contextlib.redirect_stdout(silent),
        contextlib.redirect_stderr(silent),
    ):
        try:
            parsed = megatron.parse_args(ignore_unknown_args=True)
            if cpu.active():
                cpu.adapt_arguments(parsed)
            megatron.validate_args(parsed)
            megatron.core_transformer_config_from_args(parsed)
        except (Exception, SystemExit):  # noqa: BLE001 - whatever Megatron refuses with
            return None
    return dict(vars(parsed))
