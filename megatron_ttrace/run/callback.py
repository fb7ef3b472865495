# SPDX-License-Identifier: Apache-2.0
"""A callback of Megatron-Bridge that switches the check on (megatron/bridge/training/callbacks.py).

Callbacks get neither the microbatches nor the training step, and come after the model exists. So
making one wraps the loop, as ``--ttrace`` does; as a callback it only says whether that came early
enough.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from megatron.bridge.training.callbacks import Callback

from megatron_ttrace.jobs import argv
from megatron_ttrace.jobs import script as scripts
from megatron_ttrace.jobs.flags import parse_iterations
from megatron_ttrace.jobs.settings import CHECK, Settings
from megatron_ttrace.mcore import fronts
from megatron_ttrace.run import entry


class TTraceCallback(Callback):  # type: ignore[misc]
    """Checks the run: its first iteration, or those that are asked for.

    Make it before ``pretrain`` or ``finetune`` is called. With ``ttrace check`` or flags that begin
    with ``--ttrace`` on the command line, those count.

    Args:
        directory: for traces and reports.
        iterations: as of ``--ttrace-iterations``, e.g. ``"1-2,5"``.
        exit_after: end the run after the check, with its exit code.
        settings: further fields of :class:`megatron_ttrace.jobs.settings.Settings`.

    Raises:
        TTraceError: for settings that cannot be.
    """

    def __init__(
        self,
        directory: str | Path = Settings.directory,
        iterations: str = "1",
        *,
        exit_after: bool = False,
        **settings: Any,
    ) -> None:
        if CHECK.name not in argv.words():
            chosen = Settings(
                directory=Path(directory),
                iterations=parse_iterations(iterations),
                exit_after=exit_after,
                **settings,
            )
            chosen.require_valid()
            argv.add([CHECK.name, *chosen.words()])
            # A reference runs the same script, which must not see our flags.
            scripts.is_program = True
        entry.enable()

    def on_train_start(self, context: Any) -> None:
        """Say so if the check was switched on too late."""
        del context
        if not fronts.current().is_wrapped():
            print(
                "ttrace: TTraceCallback() was made after pretrain() had begun; training goes on, "
                "UNCHECKED: make it before",
                file=sys.stderr,
                flush=True,
            )
