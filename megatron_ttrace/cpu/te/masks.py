# SPDX-License-Identifier: Apache-2.0
"""Which key a query may attend to, from positions, sequence numbers and mask arguments.

Everything is decided from the *position* of a token in its sequence, never from its place in the
local tensor. So the same code serves context parallelism, where a rank holds two separate pieces of
the sequence, and packed sequences, where several lie one after the other.
"""

from dataclasses import dataclass

import torch

CAUSAL = ("causal", "padding_causal", "causal_bottom_right", "padding_causal_bottom_right")
KINDS = ("no_mask", "padding", "arbitrary", *CAUSAL)
UNLIMITED = (-1, -1)


@dataclass(frozen=True)
class Tokens:
    """Where the tokens of a local tensor stand: position in the sequence, and which sequence."""

    position: torch.Tensor
    sequence: torch.Tensor | None = None

    @classmethod
    def whole(cls, length: int) -> "Tokens":
        """Tokens 0 to ``length`` of one sequence."""
        return cls(torch.arange(length))

    def join(self, *others: "Tokens") -> "Tokens":
        """These tokens, then the others'."""
        everyone = (self, *others)
        sequences = [tokens.sequence for tokens in everyone if tokens.sequence is not None]
        return Tokens(
            torch.cat([tokens.position for tokens in everyone]),
            torch.cat(sequences) if sequences else None,
        )


@dataclass(frozen=True)
class MaskRule:
    """A mask type with its window ``(left, right)``; -1 is unlimited.

    ``offset`` shifts queries against keys when there are more keys than queries and the mask is
    aligned at the last token of both.
    """

    kind: str
    window: tuple[int, int] = UNLIMITED
    offset: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"attention mask type {self.kind} is not one of {', '.join(KINDS)}")

    def allowed(self, queries: Tokens, keys: Tokens) -> torch.Tensor | None:
        """Boolean ``[queries, keys]``; none when everything is allowed."""
        left, right = self.window
        if self.kind in CAUSAL:
            right = 0 if right < 0 else min(right, 0)
        allowed = None
        distance = keys.position[None, :] - (queries.position[:, None] + self.offset)
        if right >= 0:
            allowed = distance <= right
        if left >= 0:
            near = distance >= -left
            allowed = near if allowed is None else allowed & near
        if queries.sequence is not None and keys.sequence is not None:
            same = queries.sequence[:, None] == keys.sequence[None, :]
            allowed = same if allowed is None else allowed & same
        return allowed

    @property
    def windowed(self) -> bool:
        """Whether a sliding window limits how far back a query sees."""
        return self.window[0] >= 0 or self.window[1] > 0
