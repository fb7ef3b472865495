# SPDX-License-Identifier: Apache-2.0
"""The flags of a command, looked up by the option that they set."""

import dataclasses
from collections.abc import Sequence
from typing import Self

from megatron_ttrace.mcore.options.decisions import option_of
from megatron_ttrace.trace.errors import TTraceError

_TENSOR, _DIVISOR = "tensor_model_parallel_size", "make_vocab_size_divisible_by"


@dataclasses.dataclass(frozen=True, slots=True)
class Flag:
    """A flag as it is written: its name, with dashes, and the words after it."""

    name: str
    values: tuple[str, ...] = ()

    @property
    def option(self) -> str | None:
        """The option of Megatron's that it sets; ``None`` for an unknown flag."""
        return option_of(self.name)

    def __str__(self) -> str:
        return " ".join(self.words())

    def words(self) -> list[str]:
        """As on a command line."""
        return [self.name, *self.values]


class CommandFlags:
    """The flags of a command; of one that is repeated the last counts, as for argparse."""

    def __init__(self, flags: Sequence[Flag]) -> None:
        self._by_option = {flag.option: flag for flag in flags}
        self.flags = tuple(
            flag for flag in flags if flag.option is None or self._by_option[flag.option] is flag
        )

    @classmethod
    def parse(cls, words: Sequence[str]) -> Self:
        """Split arguments at their flags. Megatron's scripts take no positional arguments.

        Raises ``TTraceError`` when there is a value before the first flag.
        """
        flags: list[tuple[str, list[str]]] = []
        for word in words:
            if word.startswith("--") and len(word) > 2:
                name, equals, value = word.partition("=")
                flags.append((name, [value] if equals else []))
            elif flags:
                flags[-1][1].append(word)
            else:
                raise TTraceError(
                    "unexpected argument before the first flag of the script: give flags only"
                )
        return cls([Flag(name, tuple(values)) for name, values in flags])

    def options(self) -> dict[str, str]:
        """What the flags set; ``*`` where there is no value."""
        return {flag.option or flag.name: " ".join(flag.values) or "*" for flag in self.flags}

    def has(self, option: str) -> bool:
        """Whether the option is set."""
        return option in self._by_option

    def flag(self, option: str) -> Flag | None:
        """The flag that sets an option."""
        return self._by_option.get(option)

    def text(self, option: str, default: str = "") -> str:
        """The option's value."""
        flag = self._by_option.get(option)
        return " ".join(flag.values) if flag is not None and flag.values else default

    def padded_multiple(self) -> int:
        """Megatron pads the vocabulary to a multiple of this (megatron/training/vocab_utils.py)."""
        return self.integer(_DIVISOR, 128) * self.integer(_TENSOR, 1)

    def padding(self, multiple: int | None) -> list[str]:
        """The flag that is needed, if any, for a vocabulary padded to ``multiple``, if possible.

        The softmax runs over padded rows, too: runs with other paddings have other losses.
        """
        ranks = self.integer(_TENSOR, 1)
        if multiple is None or ranks < 1 or multiple % ranks or multiple == self.padded_multiple():
            return []
        return ["--make-vocab-size-divisible-by", str(multiple // ranks)]

    def integer(self, option: str, default: int = 0) -> int:
        """The option's value as a number; ``default`` where it has none or another one."""
        try:
            return int(self.text(option))
        except ValueError:
            return default
