# SPDX-License-Identifier: Apache-2.0
"""Attributes that have another value for a while."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within this context an attribute has another value."""
    own = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


@contextlib.contextmanager
def wrapped(wraps: Iterable[tuple[Any, str, Callable[..., Any]]]) -> Iterator[None]:
    """Within this context functions (owner, name) are called by others, which get them first.

    Functions that their owner does not have are left out.
    """
    with contextlib.ExitStack() as stack:
        for owner, name, wrap in wraps:
            if (original := getattr(owner, name, None)) is not None:
                stack.enter_context(replaced(owner, name, functools.partial(wrap, original)))
        yield
