# SPDX-License-Identifier: Apache-2.0
"""Attributes that have another value, for a while or from now on."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any


@contextlib.contextmanager
def replaced(values: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Within this context attributes (owner, name) that exist have other values."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in values:
            if hasattr(owner, name):
                if name in vars(owner):
                    stack.callback(setattr, owner, name, vars(owner)[name])
                else:
                    stack.callback(delattr, owner, name)
                setattr(owner, name, value)
        yield


def wrapped(
    wraps: Iterable[tuple[Any, str, Callable[..., Any]]],
) -> contextlib.AbstractContextManager[None]:
    """Within this context functions (owner, name) are called by others, which get them first.

    Functions that their owner does not have are left out.
    """
    return replaced(
        (owner, name, functools.partial(wrap, original))
        for owner, name, wrap in wraps
        if (original := getattr(owner, name, None)) is not None
    )


@contextlib.contextmanager
def kept(values: dict[str, Any]) -> Iterator[None]:
    """Within this context a dictionary may change; afterwards it has what it had before."""
    before = dict(values)
    try:
        yield
    finally:
        values.clear()
        values.update(before)


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """From now on a function (owner, name) is called by another one, which gets it first."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, call)
