# SPDX-License-Identifier: Apache-2.0
"""Known and wanted differences between two runs, each with its reason.

A list is a TOML file of ``[[difference]]`` tables: see ``known_differences.toml`` beside this file,
which is always used, and which a list of the user's extends.
"""

import dataclasses
from fnmatch import fnmatchcase
from pathlib import Path

from megatron_ttrace.trace import codec, small_files
from megatron_ttrace.trace.errors import reported
from megatron_ttrace.trace.records import Kind, TraceKey

OWN_LIST = Path(__file__).with_name("known_differences.toml")


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """A difference that is not a fault.

    Attributes:
        name: pattern of the names of modules or parameters (``fnmatch``).
        reason: why it is wanted, or where it is from.
        kinds: of the tensors; all if empty.
        between: beginnings of two versions of megatron-core, in any order; any two runs if empty.
    """

    name: str
    reason: str
    kinds: tuple[Kind, ...] = ()
    between: tuple[str, ...] = ()

    def contradiction(self) -> str:
        """Why no list should have it."""
        if not self.name or not self.reason.strip():
            return "give a name and a reason"
        return "" if len(self.between) in (0, 2) else "between: give two versions"

    def applies(self, versions: tuple[str, str]) -> bool:
        """Whether it is one between these versions of megatron-core; empty if unknown."""
        return not self.between or any(
            all(map(_begins, pair, versions)) for pair in (self.between, self.between[::-1])
        )

    def explains(self, key: TraceKey) -> bool:
        """Whether a difference in this tensor is this one."""
        return (not self.kinds or key.kind in self.kinds) and fnmatchcase(key.name, self.name)


def _begins(release: str, version: str) -> bool:
    return version == release or version.startswith((f"{release}.", f"{release}+"))


@dataclasses.dataclass(frozen=True, slots=True)
class _File:
    difference: tuple[Difference, ...] = ()


def read(path: Path) -> tuple[Difference, ...]:
    """A list of differences.

    Raises:
        TTraceError: when the file cannot be read, or one of its tables makes no sense.
    """
    what = f"{path} is not a list of known differences"
    with reported(what, OSError, ValueError, RecursionError, advice="see docs/diff.md"):
        content = small_files.toml(path)
        differences = codec.decode(_File, content).difference
        fields = {field.name for field in dataclasses.fields(Difference)}
        unknown = {*content} - {"difference"}
        unknown |= {name for table in content.get("difference", ()) for name in table} - fields
        if unknown:
            raise codec.CodecError(f"{min(unknown)!r} is not a field")
        return differences
