# SPDX-License-Identifier: Apache-2.0
"""The matrix as data: layouts (``layouts.toml``) x models x dtypes.

Models are small, so that a check takes seconds. Numbers of heads, groups and layers differ on
purpose, so that a transposed or miscounted dim does not fit by chance.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ttrace.evaluation.suites import Data, data_arguments
from megatron_ttrace.jobs.resources import launch_dir
from megatron_ttrace.trace import codec
from megatron_ttrace.trace.errors import TTraceError

if TYPE_CHECKING:
    from megatron_ttrace.saved.runner import Case

VOCABULARY = 128
COMMON = (
    "--hidden-size 64 --num-attention-heads 8 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 3 --lr 1e-3 --lr-warmup-iters 0 "
    f"--tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --eval-iters 0 "
    "--attention-dropout 0 --hidden-dropout 0"
)

LAYOUTS_FILE = Path(__file__).with_name("layouts.toml")
_TABLES: dict[str, Any] = tomllib.loads(LAYOUTS_FILE.read_text(encoding="utf-8"))


def _texts(table: str, **parts: str) -> dict[str, str]:
    """A table of texts, which may quote ``parts`` and earlier texts of the table in braces."""
    texts: dict[str, str] = {}
    for name, text in _TABLES[table].items():
        texts[name] = text.format_map(parts | texts)
    return texts


PARTS = _texts("parts")
MODELS = _texts("models", **PARTS)
DTYPES = _texts("dtypes")
WIDE = ("fp32", "bf16")
FLAGS = _texts("flags")
SCRIPTS = _texts("scripts")


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a job is spread over ranks.

    Attributes:
        arguments: Megatron's, with the words of :data:`FLAGS`.
        finding: words of a heading in docs/findings.md, if a proven fault of Megatron makes the
            layout diverge.
    """

    name: str
    nproc: int
    arguments: str
    models: tuple[str, ...] = ("gpt", "llama")
    dtypes: tuple[str, ...] = WIDE
    data: Data = Data.MOCK
    finding: str = ""


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One job: a layout of a model in a dtype. For the fields see :class:`Layout`."""

    name: str
    nproc: int
    arguments: tuple[str, ...]
    data: Data = Data.MOCK
    finding: str = ""
    script: str = "pretrain_gpt.py"

    def case(self, directory: Path, name: str = "", more: tuple[str, ...] = ()) -> Case:
        """To be run below ``directory``, under another name and with more arguments if given."""
        from megatron_ttrace.saved.runner import Case

        data = data_arguments(self.data, directory, VOCABULARY)
        return Case(
            name=(name or self.name).replace("/", "-"),
            arguments=(*self.arguments, *data, *more),
            nproc=self.nproc,
            script=launch_dir() / self.script,
        )


def arguments_of(model: str, words: str) -> tuple[str, ...]:
    """Megatron's arguments without the data set, for a model and the words of a layout."""
    flags = " ".join(FLAGS.get(word, word) for word in words.split())
    return tuple(f"{COMMON} {MODELS[model]} {flags}".split())


def configurations() -> list[Configuration]:
    """All of them; names are ``layout/model/dtype``."""
    return [
        Configuration(
            name=f"{layout.name}/{model}/{dtype}",
            nproc=layout.nproc,
            arguments=arguments_of(model, f"{layout.arguments} {DTYPES[dtype]}"),
            data=layout.data,
            finding=layout.finding,
            script=SCRIPTS.get(model, "pretrain_gpt.py"),
        )
        for layout in codec.decode(tuple[Layout, ...], _TABLES["layout"])
        for model in layout.models
        for dtype in layout.dtypes
    ]


def select(everything: Sequence[Configuration], patterns: Sequence[str]) -> list[Configuration]:
    """Those whose name matches any of the shell patterns (``*`` also matches slashes).

    Raises ``TTraceError`` for a pattern that none matches.
    """
    names = {pattern: fnmatch.filter((c.name for c in everything), pattern) for pattern in patterns}
    for pattern, matching in names.items():
        if not matching:
            raise TTraceError(f"no configuration matches {pattern}: see ttrace eval matrix --list")
    chosen = {name for matching in names.values() for name in matching}
    return [c for c in everything if not patterns or c.name in chosen]
