# SPDX-License-Identifier: Apache-2.0
"""Which code describes a parameter's shards for checkpoints.

Each module describes its parameters, or leaves that to the module around it; modules around others
change their descriptions (``SequentialMLP.sharded_state_dict`` numbers its experts).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from megatron_ttrace.trace.modules import is_within
from megatron_ttrace.trace.resumed import code_of


def describing(
    places: Mapping[str, str], name: str, wrong: Iterable[str] = (), right: Collection[str] = ()
) -> str:
    """The place that describes a parameter, of those by module; empty if there is none.

    Where no one place describes all parameters of its layer that are ``wrong``, it is that of the
    module around them. What also describes ``right`` ones of the same name is passed over within
    the layer: the module around it has given it another description.
    """
    alike = [name, *(other for other in wrong if _layer(other) == _layer(name))]
    is_one = len({_innermost(places, [other]) for other in alike}) == 1
    return _innermost(places, [name] if is_one else alike, right)


def nearest(changes: Iterable[str], where: str) -> tuple[str, ...]:
    """The places of changes, once each: in the function ``where``, then in its file, first."""
    here = code_of(where)

    def order(place: str) -> tuple[bool, bool]:
        return code_of(place) != here, code_of(place)[0] != here[0]

    return tuple(sorted(dict.fromkeys(changes), key=order))


def _innermost(places: Mapping[str, str], names: Sequence[str], right: Collection[str] = ()) -> str:
    words = names[0].split(".")
    around = [".".join(words[:number]) for number in range(len(words) - 1, 0, -1)]
    shared = [m for m in around if m in places and all(is_within(name, m) for name in names)]

    def is_blamed(module: str) -> bool:
        ends = [name.removeprefix(module) for name in names]
        others = (name.removesuffix(end) for name in right for end in ends if name.endswith(end))
        inside = is_within(module, _layer(names[0]))
        return inside and all(places.get(other) != places[module] for other in others)

    return places[next(filter(is_blamed, shared), shared[0])] if shared else ""


def _layer(name: str) -> str:
    """The name of a parameter's layer; its own if it is in none."""
    words = name.split(".")
    ends = (number for number, word in enumerate(words, 1) if word.isdigit())
    return ".".join(words[: next(ends, None)])
