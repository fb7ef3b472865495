# SPDX-License-Identifier: Apache-2.0
"""Any value of a record's type, from its type hints."""

import dataclasses
import types
import typing
from enum import Enum
from typing import Annotated, Any

from hypothesis import strategies as st

from megatron_ttrace.placement.mesh import SINGLE
from megatron_ttrace.trace.codec import Bounds
from megatron_ttrace.trace.collectives import UNRECORDED
from megatron_ttrace.trace.index import Entry
from megatron_ttrace.trace.meta import CandidateMeta
from megatron_ttrace.trace.records import Outcome, Run, Summary

_COUNTS = st.dictionaries(st.sampled_from([str(outcome) for outcome in Outcome]), st.integers(0, 9))
_CONSTRAINED: dict[tuple[Any, str], st.SearchStrategy[Any]] = {
    (Run, "id"): st.text("0123456789abcdef", min_size=16, max_size=16),
    (Summary, "counts"): _COUNTS,
    (Summary, "residuals"): st.just(()),  # tested by themselves
    (Summary, "run"): st.none(),
    (CandidateMeta, "meshes"): st.just((SINGLE,)),
    (CandidateMeta, "ledger"): st.just(UNRECORDED),
    (Entry, "dtype"): st.sampled_from(["float32", "float8_e4m3fn"]),
    (Entry, "partial_over"): st.sampled_from(["", "tp"]),
    (Entry, "factor"): st.floats(0.1, 10.0),
    (Entry, "same_as"): st.just(-1),
}


def arbitrary(wanted: Any) -> st.SearchStrategy[Any]:
    """Values that the codec reads as this type; none contradicts itself."""
    origin, args = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is Annotated:
        bounds = next((arg for arg in args if isinstance(arg, Bounds)), None)
        if bounds is None:
            return arbitrary(args[0])
        return _number(args[0], bounds)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(arbitrary, args))
    if origin is tuple and args[1:] == (...,):
        return st.lists(arbitrary(args[0]), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*map(arbitrary, args))
    if origin is dict:
        return st.dictionaries(st.text(max_size=5), arbitrary(args[1]), max_size=2)
    if isinstance(wanted, type) and issubclass(wanted, Enum):
        return st.sampled_from(wanted)
    if wanted is type(None):
        return st.none()
    plain: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(-(1 << 63), (1 << 63) - 1),
        float: st.floats(allow_nan=False),
        str: st.text(max_size=9),
        bool: st.booleans(),
        Any: st.text(max_size=5),
    }
    return plain[wanted] if wanted in plain else st.deferred(lambda: _record(wanted))


def _number(wanted: type, bounds: Bounds) -> st.SearchStrategy[Any]:
    if wanted is float:
        return st.floats(bounds.least, bounds.most, allow_nan=False)
    return st.integers(int(bounds.least), int(bounds.most))


def _record(wanted: Any) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(wanted, include_extras=True)
    names = (
        [f.name for f in dataclasses.fields(wanted)] if dataclasses.is_dataclass(wanted) else hints
    )
    fields = {n: _CONSTRAINED.get((wanted, n), arbitrary(hints[n])) for n in names}
    values = st.builds(wanted, **fields)
    if not hasattr(wanted, "contradiction"):
        return values
    return values.filter(lambda record: not record.contradiction())
