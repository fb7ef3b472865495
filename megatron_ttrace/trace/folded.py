# SPDX-License-Identifier: Apache-2.0
"""JSON values of many ranks in which everything that occurs twice is stored once.

Ranks of the same structure say the same, or nearly so: all tensor-parallel ranks of all replicas
run the same collectives, in groups of their own. So lists and objects that are equal, of any ranks
and at any depth, become one node of a table, and ranks with equal values one entry. What is read
back is what was folded; nothing is lost.

A message is ``{"nodes": [...], "ranks": [...]}``. A node is a list or an object; ``[7]`` in it
stands for another one, by its number, and everything else for itself. A node follows those that it
contains. An entry is a node's number and the ranks that have it, as runs (``trace/counted.py``).
"""

from collections.abc import Callable, Iterable
from typing import Any

from megatron_ttrace.trace import codec
from megatron_ttrace.trace.codec import CodecError
from megatron_ttrace.trace.counted import Runs, ranks_of, runs_of


class _Table:
    """Nodes, each once."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self._numbers: dict[str, int] = {}

    def node(self, node: Any) -> int:
        """The number of a node whose containers are references."""
        # 1, 1.0 and True are equal, but are not the same JSON.
        number = self._numbers.setdefault(repr(node), len(self.nodes))
        if number == len(self.nodes):
            self.nodes.append(node)
        return number

    def add(self, value: Any) -> int:
        """The number of a list or an object, whose parts become nodes first."""
        return self.node(_each(value, lambda part: [self.add(part)]))


def _each(node: Any, change: Callable[[Any], Any]) -> Any:
    """A list or an object with every list and object in it changed."""
    if isinstance(node, dict):
        return {
            name: change(part) if isinstance(part, (list, tuple, dict)) else part
            for name, part in node.items()
        }
    return [change(part) if isinstance(part, (list, tuple, dict)) else part for part in node]


def fold(values: dict[int, Any]) -> dict[str, Any]:
    """A message of the lists or objects that ranks have, by rank."""
    table, held = _Table(), dict[int, list[int]]()
    for rank, value in values.items():
        held.setdefault(table.add(value), []).append(rank)
    return _message(table, held)


def merge(messages: Iterable[Any]) -> dict[str, Any]:
    """One message of several, of different ranks. Raises ``CodecError`` on a foreign one."""
    table, held = _Table(), dict[int, list[int]]()
    for message in messages:
        numbers: list[int] = []

        def renumbered(part: Any, known: list[int] = numbers) -> list[int]:
            return [known[_reference(part, len(known))]]

        nodes, entries = _read(message)
        for node in nodes:
            numbers.append(table.node(_each(node, renumbered)))
        for number, runs in entries:
            held.setdefault(numbers[number], []).extend(ranks_of(runs))
    return _message(table, held)


def unfold(message: Any) -> dict[int, Any]:
    """The values by rank, in the order of ranks; equal parts of them are one object.

    Raises:
        CodecError: on a foreign message.
    """
    nodes, entries = _read(message)
    values: list[Any] = []
    for node in nodes:
        values.append(_each(node, lambda part: values[_reference(part, len(values))]))
    found = {rank: values[number] for number, runs in entries for rank in ranks_of(runs)}
    return dict(sorted(found.items()))


class Once:
    """Reads values of a message; what is one object is read once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, int], tuple[Any, Any]] = {}

    def __call__[T](self, read: Callable[[Any], T], value: Any) -> T:
        """What ``read`` makes of a value."""
        key = read, id(value)
        if key not in self._known:
            # The value is kept: another one must not get its place.
            self._known[key] = value, read(value)
        result: T = self._known[key][1]
        return result

    def each[T](self, read: Callable[[Any], T], values: Any) -> tuple[T, ...]:
        """What ``read`` makes of each value of a list. Raises ``CodecError``."""
        if not isinstance(values, list):
            raise CodecError("expected a list")
        return tuple(self(read, value) for value in values)


def _message(table: _Table, held: dict[int, list[int]]) -> dict[str, Any]:
    return {
        "nodes": table.nodes,
        "ranks": [[number, runs_of(ranks)] for number, ranks in held.items()],
    }


def _read(message: Any) -> tuple[list[Any], tuple[tuple[int, Runs], ...]]:
    if not isinstance(message, dict) or not isinstance(message.get("nodes"), list):
        raise CodecError("expected folded values")
    nodes = message["nodes"]
    if not all(isinstance(node, (list, dict)) for node in nodes):
        raise CodecError("expected lists and objects", ".nodes")
    entries = codec.decode(tuple[tuple[int, Runs], ...], message.get("ranks"))
    for number, _ in entries:
        _reference([number], len(nodes))
    return nodes, entries


def _reference(part: Any, known: int) -> int:
    """The number in a reference to one of the first ``known`` nodes."""
    number = part[0] if isinstance(part, list) and len(part) == 1 else None
    if type(number) is not int or not 0 <= number < known:
        raise CodecError("expected a reference to a node before", ".nodes")
    return number
