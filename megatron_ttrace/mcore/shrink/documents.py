# SPDX-License-Identifier: Apache-2.0
"""The data of a small job: text that every machine has, in documents of very uneven length.

Scripts that mask word pieces (BERT, T5) keep their own data: they need sentences, and a tokenizer
with tokens for masks, whose vocabulary is not here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megatron_ttrace.errors import TTraceError
from megatron_ttrace.mcore import script as scripts
from megatron_ttrace.mcore import text_data
from megatron_ttrace.mcore.versions import quiet_imports

_BYTES = 300_000
_SHORTEST, _LONGEST = 1, 400
"""Bytes of a document: a sample has none to many borders between documents."""


_MASKED = b"MaskedWordPieceDataset"
"""Part of the names of the data sets that BERT's and T5's scripts build."""


def suits(script: str) -> bool:
    """Whether a script can train on this text. Nothing is imported."""
    try:
        return _MASKED not in Path(script).read_bytes()
    except OSError:
        return True  # whoever runs the script says so


def write(prefix: Path) -> Path:
    """Write the data set, once.

    Args:
        prefix: of the ``.bin`` and ``.idx`` files.

    Raises:
        TTraceError: when it cannot be written.
    """
    if not prefix.with_name(f"{prefix.name}.idx").exists():
        with quiet_imports():
            text_data.write_corpus(_cut(text_data.standard_library_text(_BYTES)), prefix)
    return prefix


def _cut(text: bytes) -> Iterator[bytes]:
    """Pieces of random lengths, evenly spread on a logarithmic scale."""
    random = np.random.default_rng(1)
    at = 0
    while at < len(text):
        length = int(np.exp(random.uniform(np.log(_SHORTEST), np.log(_LONGEST))))
        yield text[at : at + length]
        at += length


def arguments(script: str, prefix: Path) -> list[str]:
    """The arguments of a small job's data; none where it keeps its own.

    Args:
        script: a training script, whose Megatron counts tokens of its tokenizer.
        prefix: of the data set.
    """
    if not suits(script):
        return []
    words = text_data.training_flags(prefix, _release(script)).split()
    return [*words, "--split", "99,1,0"]


def _release(script: str) -> str:
    """The version of the Megatron that the script would import. Nothing is imported."""
    found = scripts.origins(scripts.search_path(script)).get("megatron.core")
    if found is None:
        raise TTraceError("megatron-core is not installed: pip install 'megatron-core==0.19.0'")
    text = Path(found).with_name("package_info.py").read_text(encoding="utf-8")
    parts = [re.search(rf"^{name} *= *([0-9]+)", text, re.MULTILINE) for name in ("MAJOR", "MINOR")]
    return ".".join(part[1] for part in parts if part)
