# SPDX-License-Identifier: Apache-2.0
"""What a tested hypothesis says about a failed tensor."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """A tested hypothesis.

    ``text`` says what is wrong, ``cause`` is its sort (see megatron_ttrace/mcore/places.py),
    ``axis`` the mesh axes it speaks of, joined by ``+``.
    """

    text: str
    cause: str
    axis: str = ""
