# SPDX-License-Identifier: Apache-2.0
"""JSON values of many ranks in which everything that occurs twice is stored once.

Ranks of the same structure send the same, or nearly so: all tensor-parallel ranks of all replicas
run the same collectives, in groups of their own. So lists and objects that are equal, of any ranks
and at any depth, become one node of a table, and ranks with equal values one entry. What is read
back is what was folded; nothing is lost.

A message is ``{"nodes": [...], "ranks": [...]}``. A node is a list or an object; ``[7]`` in it
is a reference to the node with that number; all else is a plain value. A node follows those that it
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
    table, ranks_by_node = _Table(), dict[int, list[int]]()
    for rank, value in values.items():
        ranks_by_node.setdefault(table.add(value), []).append(rank)
    return _message(table, ranks_by_node)


def merge(messages: Iterable[Any]) -> dict[str, Any]:
    """One message of several, of different ranks. Raises ``CodecError`` on a foreign one."""
    table, ranks_by_node = _Table(), dict[int, list[int]]()
    for message in messages:
        numbers: list[int] = []

        def renumbered(part: Any, numbers: list[int] = numbers) -> list[int]:
            return [numbers[_reference(part, len(numbers))]]

        nodes, entries = _read(message)
        for node in nodes:
            numbers.append(table.node(_each(node, renumbered)))
        for number, runs in entries:
            ranks_by_node.setdefault(numbers[number], []).extend(ranks_of(runs))
    return _message(table, ranks_by_node)


def unfold(message: Any) -> dict[int, Any]:
    """The values by rank, in order; equal parts of them are one object. Raises ``CodecError``."""
    nodes, entries = _read(message)
    values: list[Any] = []
    for node in nodes:
        values.append(_each(node, lambda part: values[_reference(part, len(values))]))
    by_rank = {rank: values[number] for number, runs in entries for rank in ranks_of(runs)}
    return dict(sorted(by_rank.items()))


class Once:
    """Reads values of a message, each object once."""

    def __init__(self) -> None:
        self._results: dict[tuple[Any, int], tuple[Any, Any]] = {}

    def __call__[T](self, read: Callable[[Any], T], value: Any) -> T:
        """What ``read`` makes of a value."""
        key = read, id(value)
        if key not in self._results:
            # The value is kept: another one must not get its place in memory.
            self._results[key] = value, read(value)
        result: T = self._results[key][1]
        return result

    def each[T](self, read: Callable[[Any], T], values: Any) -> tuple[T, ...]:
        """What ``read`` makes of each value of a list. Raises ``CodecError``."""
        if not isinstance(values, list):
            raise CodecError("expected a list")
        return tuple(self(read, value) for value in values)


def _message(table: _Table, ranks_by_node: dict[int, list[int]]) -> dict[str, Any]:
    ranks = [[number, runs_of(ranks)] for number, ranks in ranks_by_node.items()]
    return {"nodes": table.nodes, "ranks": ranks}


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


def _reference(part: Any, nodes: int) -> int:
    """The number in a reference to one of the first ``nodes`` nodes."""
    number = part[0] if isinstance(part, list) and len(part) == 1 else None
    if type(number) is not int or not 0 <= number < nodes:
        raise CodecError("expected a reference to a node before", ".nodes")
    return number
