# SPDX-License-Identifier: Apache-2.0
"""What every option of a known Megatron (``versions.KNOWN``) is about, from roles.toml.

Options are named as attributes of Megatron's parsed arguments. A release that registers an option
without a role fails ``tests/mcore/options/test_decisions.py``.
"""

import enum
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType


class Role(enum.Enum):
    """What an option is about."""

    CODE = "decides which code runs, or what it computes"
    DATA = "decides what becomes of the data"
    SIZE = "decides how much is computed"
    AXIS = "decides how many ranks, stages or layers a part of the layout spans"
    LAYOUT = "decides how work is spread, overlapped, recomputed or stored"
    TRANSPORT = "decides how ranks exchange bytes"
    LENGTH = "decides how long the run is"
    INPUT = "names data or a tokenizer"
    CHECKPOINT = "is about checkpoints"
    OPERATION = "logs, profiles or supervises the run"
    FOREIGN = "belongs to another program than pretraining"
    REFUSED = "cannot be checked"


def _read() -> Iterator[tuple[str, Role, str, str]]:
    """Of each option: its name, its role, how many values it has, and what it is reset to."""
    roles = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    for role, words in roles.items():
        for word in words.split():
            option, _, reset = word.partition("=")
            name, _, values = option.partition(":")
            yield name, Role[role], values or "1", reset


_OPTIONS = list(_read())
ROLES = MappingProxyType({name: role for name, role, _, _ in _OPTIONS})
"""The role of each option."""
MANY = 1 << 30
VALUES = MappingProxyType(
    {name: MANY if values == "+" else int(values) for name, _, values, _ in _OPTIONS}
)
"""How many words follow each option at most; :data:`MANY`: any number."""
RESETS = MappingProxyType({name: json.loads(reset) for name, _, _, reset in _OPTIONS if reset})
"""What a reference resets options to; it keeps the others."""
