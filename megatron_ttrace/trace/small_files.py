# SPDX-License-Identifier: Apache-2.0
"""Small text files that users give: read within bounds, whatever is in them.

Nothing here waits for a pipe, fills the memory, or recurses without end. All functions raise
``OSError`` when a file cannot be read, and ``CodecError`` (a ``ValueError``) when it is not what it
should be: callers say which file, and what to do.
"""

import tomllib
from pathlib import Path
from typing import Any

import yaml as pyyaml

from megatron_ttrace.trace import codec
from megatron_ttrace.trace.codec import CodecError

LIMIT = 1 << 18
"""Bytes of a file. The largest configuration of Megatron-LM's functional tests has 10,000."""
_DEPTH = 16
_NODES = 1 << 14
"""Values of a YAML file, with those that aliases repeat."""


def text(path: Path) -> str:
    """The content of a file in UTF-8."""
    try:
        return codec.read(path, LIMIT).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CodecError(f"byte {error.start} is not UTF-8") from None


def toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file."""
    content = text(path)
    try:
        return tomllib.loads(content)
    except RecursionError:
        raise CodecError("nested too deeply") from None
    except ValueError as error:
        raise CodecError(str(error)) from None


def yaml(path: Path) -> Any:
    """The content of a YAML file, all scalars as text.

    What YAML takes for numbers would come back in another notation.
    """
    content = text(path)
    try:
        return pyyaml.load(content, Loader=_Loader)  # noqa: S506 - a BaseLoader makes only text
    except pyyaml.YAMLError as error:
        raise CodecError(" ".join(str(error).split())) from None
    except (RecursionError, TypeError) as error:
        raise CodecError(f"not a configuration ({type(error).__name__})") from None


class _Loader(pyyaml.BaseLoader):  # type: ignore[misc]
    """Counts values as they will be when aliases are expanded, and their nesting."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0
        self._nodes = 0
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        before = self._nodes
        is_alias = self.check_event(pyyaml.AliasEvent)
        self._depth += 1
        self._nodes += 1
        if self._depth > _DEPTH:
            raise pyyaml.YAMLError("nested too deeply")
        node = super().compose_node(parent, index)
        if is_alias:
            # Inside itself, it is not counted yet.
            self._nodes += self._sizes.get(id(node), _NODES)
        if self._nodes > _NODES:
            raise pyyaml.YAMLError(f"more than {_NODES} values")
        self._depth -= 1
        self._sizes.setdefault(id(node), self._nodes - before)
        return node
