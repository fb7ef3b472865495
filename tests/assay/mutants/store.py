# SPDX-License-Identifier: Apache-2.0
"""Rows of a campaign over all mutants in a file, so that it can be interrupted and continued."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import megatron_ttrace
from megatron_ttrace.evaluation.matrix.configurations import Configuration
from megatron_ttrace.trace import codec
from megatron_ttrace.trace.errors import TTraceError
from tests.assay.mutants import survivors
from tests.assay.mutants.records import MutantRow
from tests.assay.mutants.scan import modules

_OURS = ("evaluation", "cli", "report")
"""Rooms of this package that do not change what a check finds."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Header:
    """The first line: a digest of everything that rows depend on."""

    campaign: str


def identity(layouts: Sequence[Configuration]) -> str:
    """A digest of Megatron's scanned code, of this package's, and of the layouts."""
    package = Path(megatron_ttrace.__file__).parent
    own = [p for p in sorted(package.rglob("*.py")) if p.relative_to(package).parts[0] not in _OURS]
    own += sorted(Path(__file__).parent.glob("*.py"))
    found = hashlib.sha256(repr(layouts).encode())
    for path in (*own, *(path for _, path in modules())):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def start(path: Path, campaign: str) -> list[MutantRow]:
    """The rows that the file has; a new file if there is none.

    Raises:
        TTraceError: when its rows are of another campaign, or damaged.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        append(path, _Header(campaign))
        return []
    header, rows = _read(path)
    if header.campaign != campaign:
        raise TTraceError(
            f"{path} was written with other code of Megatron or of this package, or with other "
            "layouts: remove it, or choose another --directory"
        )
    return rows


def load(path: Path) -> list[MutantRow]:
    """The rows of a file, explained as ``survivors.toml`` explains them now.

    Raises:
        TTraceError: when there is no such file, or it is damaged.
    """
    return _read(path)[1]


def append(path: Path, record: _Header | MutantRow) -> None:
    """Add a line."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(codec.encode(record)) + "\n")


def _read(path: Path) -> tuple[_Header, list[MutantRow]]:
    known = survivors.load()
    header, rows, line = None, [], 0
    try:
        for value in codec.lines(path):
            if header is None:
                header = codec.decode(_Header, value)
            else:
                row = codec.decode(MutantRow, value)
                explanation, why = survivors.explanation_of(row.mutant, known)
                rows.append(dataclasses.replace(row, explanation=explanation, why=why))
            line += 1
    except OSError as error:
        raise TTraceError(f"{path}: cannot be read ({error.strerror})") from error
    except codec.CodecError as error:
        raise TTraceError(f"{path}:{line + 1}: {error}; remove this line") from error
    if header is None:
        raise TTraceError(f"{path}: is empty; remove it")
    return header, rows
