# SPDX-License-Identifier: Apache-2.0
"""A reference's trace against the model of ``transformers`` that a ``config.json`` describes.

The trace is the trusted side, because tolerances are its own. What ``transformers`` computes is
judged as a run on one rank.
"""

import importlib.metadata
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ttrace.jobs.processes import apart
from megatron_ttrace.saved.huggingface import differences
from megatron_ttrace.saved.huggingface.families import family_of, read_config
from megatron_ttrace.saved.huggingface.inputs import Inputs
from megatron_ttrace.saved.known import Difference
from megatron_ttrace.trace import budget
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.judged import Judged
from megatron_ttrace.trace.outcomes import Reason, Unexercised
from megatron_ttrace.trace.records import Outcome
from megatron_ttrace.trace.store import META, TraceReader, read_meta

PREFIX = "hf:"
"""Distinguishes a config.json from a trace or a command."""
TESTED = "5.12.1"
"""The release of ``transformers`` that this is tested with."""


def config_of(text: object) -> Path | None:
    """The config that ``hf:PATH`` names; ``None`` of everything else."""
    name = str(text)
    if not name.startswith(PREFIX):
        return None
    path = Path(name.removeprefix(PREFIX))
    return path / "config.json" if path.is_dir() else path


def version() -> str:
    """Of ``transformers``. Raises ``TTraceError`` when it is not installed."""
    try:
        return importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        raise TTraceError(
            "transformers is not installed here: pip install 'megatron-ttrace[hf]'"
        ) from None


def require(config: Path) -> None:
    """Notice before the long work what cannot be compared. Raises ``TTraceError``."""
    family_of(read_config(config))
    version()


def open_reference(folder: Path) -> TraceReader:
    """The reference in a check's or record's directory. Raises ``TTraceError`` without one."""
    home = folder / "reference" if (folder / "reference" / META).exists() else folder
    if not (home / META).exists() or read_meta(home).get("role") != "reference":
        raise TTraceError(
            f"{folder} holds no reference: give the directory of ttrace check or ttrace record"
        )
    return TraceReader(home)


def avoided(config: Path, folder: Path) -> list[str]:
    """What a reference has that it should not have been made with.

    Raises:
        TTraceError: when it cannot be compared.
    """
    return differences.avoided(Inputs.read(config, open_reference(folder)))


class Compared:
    """A model of ``transformers``, run on a reference's trace, and a review of the verdicts."""

    not_asked = frozenset({Unexercised.ONE_RANK, Unexercised.UPDATE})
    """Features of a job: the model computes on one device, without an optimizer, by design."""

    explains = False
    """Causes are what goes wrong where a model is spread over ranks."""

    def __init__(
        self, config: Path, trusted: TraceReader, directory: Path, known: Sequence[Difference]
    ) -> None:
        """Run the model, and write its trace to ``directory``.

        Raises:
            TTraceError: when it cannot be compared.
        """
        self.inputs = Inputs.read(config, trusted)
        differences.require_comparable(self.inputs)
        self.version = version()
        self.reference = trusted.directory
        # A model is no version of megatron-core.
        self._known = [difference for difference in known if not difference.between]
        self._explained: Counter[str] = Counter()
        needed, free = self.inputs.needed_bytes, budget.host_room(1)
        self._by_layer = needed > free
        self._sizes = f"{budget.shown(needed)} needed for all, {budget.shown(free)} available"
        _run(self.inputs.path, trusted.directory, directory, by_layer=self._by_layer)
        self._correspondence = self.inputs.correspondence()

    @property
    def name(self) -> str:
        """Of the model."""
        return f"transformers' {self.inputs.family.architecture} {self.version}"

    def __call__(self, verdicts: Sequence[Judged]) -> list[Judged]:
        """The verdicts; what has no counterpart, and known differences, ``unchecked``."""
        return [self._reviewed(verdict) for verdict in verdicts]

    def layout(self) -> dict[str, Any]:
        """The other side, for the report."""
        return {"model": self.name}

    def notices(self) -> list[str]:
        """What was compared, and how."""
        trace = self.reference
        notices = [
            f"the reference is {trace}; compared with it is {self.name}, in float32, with its "
            f"weights and inputs and the model of {self.inputs.path}"
        ]
        if self._by_layer:
            notices.append(
                f"compared layer by layer, with the trace's inputs and gradients: {self._sizes}"
            )
        for name, value in self.inputs.replaced.items():
            notices.append(f"{name} is the trace's {self.inputs.config[name]}, not {value}")
        notices += differences.notices(self.inputs)
        notices += [f"known difference, not judged: {text}" for text in self._explained]
        return notices

    def _reviewed(self, verdict: Judged) -> Judged:
        key, is_open = verdict.key, verdict.verdict in (Outcome.MISSING, Outcome.UNCHECKED)
        is_later = key.iteration != self.inputs.iteration
        if is_open and (is_later or self._correspondence.row(key) is None):
            return verdict.unchecked(Reason.NO_COUNTERPART, differences.why(self.inputs, key))
        for difference in self._known if verdict.verdict.is_failure else ():
            if difference.explains(verdict.key):
                self._explained[difference.reason] += 1
                return verdict.unchecked(Reason.KNOWN, difference.reason)
        return verdict


def _run(config: Path, reference: Path, directory: Path, *, by_layer: bool) -> None:
    """Run the model in a process of its own. Raises ``TTraceError`` with its reason."""
    code, why = apart.ttrace(
        sys.executable,
        [str(path.absolute()) for path in (config, reference, directory)] + ["by-layer"] * by_layer,
        os.environ,
        quiet=True,
        module="megatron_ttrace.saved.huggingface.process",
    )
    if code:
        raise TTraceError(why)
