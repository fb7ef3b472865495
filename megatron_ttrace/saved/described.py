# SPDX-License-Identifier: Apache-2.0
"""Which code describes a parameter's shards for checkpoints.

Each module describes its parameters, or leaves that to the module around it; modules around others
change their descriptions (``SequentialMLP.sharded_state_dict`` numbers its experts).
"""

from collections.abc import Iterable, Mapping, Sequence

from megatron_ttrace.trace.modules import is_within
from megatron_ttrace.trace.resumed import code_of


def describing(places: Mapping[str, str], name: str, wrong: Iterable[str] = ()) -> str:
    """The place that describes a parameter, of those by module; empty if there is none.

    Where no one place describes all parameters of its layer that are ``wrong``, it is that of the
    module around them.
    """
    alike = [name, *(other for other in wrong if _layer(other) == _layer(name))]
    is_one = len({_innermost(places, [other]) for other in alike}) == 1
    return _innermost(places, [name] if is_one else alike)


def nearest(changes: Iterable[str], where: str) -> tuple[str, ...]:
    """The places of changes, once each: in the function ``where``, then in its file, first."""
    here = code_of(where)

    def order(place: str) -> tuple[bool, bool]:
        return code_of(place) != here, code_of(place)[0] != here[0]

    return tuple(sorted(dict.fromkeys(changes), key=order))


def _innermost(places: Mapping[str, str], names: Sequence[str]) -> str:
    words = names[0].split(".")
    around = (".".join(words[:number]) for number in range(len(words) - 1, 0, -1))
    shared = (module for module in around if all(is_within(name, module) for name in names))
    return next((place for module in shared if (place := places.get(module))), "")


def _layer(name: str) -> str:
    """The name of a parameter's layer; its own if it is in none."""
    words = name.split(".")
    ends = (number for number, word in enumerate(words, 1) if word.isdigit())
    return ".".join(words[: next(ends, None)])
