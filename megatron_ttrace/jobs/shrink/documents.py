# SPDX-License-Identifier: Apache-2.0
"""The data of a small job: text that every machine has, in documents of very uneven length.

Scripts that mask word pieces (BERT, T5) keep their own data: they need sentences, and a tokenizer
with tokens for masks, whose vocabulary is not here.

Jobs with ``--sft`` are given conversations and a tokenizer of characters, in a format that the
packages ``datasets`` and ``transformers`` read, which Megatron needs for them.
"""

import importlib.util
import json
import string
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from megatron_ttrace.jobs import text_data
from megatron_ttrace.mcore.fronts.bridge_small import START
from megatron_ttrace.mcore.versions import quiet_imports
from megatron_ttrace.trace import owned
from megatron_ttrace.trace.errors import reported

SFT = "--sft"

_BYTES = 300_000
_SHORTEST, _LONGEST = 1, 400
"""Bytes of a document: a sample has none to many borders between documents."""


_MASKED = b"MaskedWordPieceDataset"
"""Part of the names of the data sets that BERT's and T5's scripts build."""


FIM_TOKENS = {"prefix": 248, "middle": 249, "suffix": 250, "pad": 251, "eod": text_data.EOD}
"""Tokens of fill-in-the-middle samples: bytes that no text has, and the end of a document."""

LINE_END = ord("\n")

_CHATS, _TURN = 64, 24
"""Samples, and the most characters of an assistant's turn."""
_SPECIAL = ("<unk>", "</s>", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>", "<SPECIAL_233>")
"""Tokens in the prompt formats of Megatron (``sft_tokenizer.py``)."""
_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
)
"""Answers are marked, for losses of these alone."""


def suits(script: str) -> bool:
    """Whether a script can train on this text. Nothing is imported."""
    try:
        return _MASKED not in Path(script).read_bytes()
    except OSError:
        return True  # running it reports the reason


def can_chat() -> bool:
    """Whether the packages that ``--sft`` needs are installed. Nothing is imported."""
    specs = map(importlib.util.find_spec, ("datasets", "transformers"))
    return all(spec is not None and spec.origin is not None for spec in specs)


def write(prefix: Path, words: Sequence[str] = ()) -> Path:
    """Write the data set, once, in a directory that git ignores if it is a new one.

    ``prefix`` is of the ``.bin`` and ``.idx`` files. If ``words``, the job's arguments, have
    ``--sft``, there are conversations, too. Raises ``TTraceError`` when it cannot be written.
    """
    with reported(f"{prefix} cannot be written", OSError):
        owned.make(prefix.parent, ignored=True)
        if not prefix.with_name(f"{prefix.name}.idx").exists():
            with quiet_imports():
                text_data.write_corpus(_cut(b"".join(text_data.standard_library(_BYTES))), prefix)
        if SFT in words:
            _write_chats(chats(prefix))
    return prefix


def chats(prefix: Path) -> Path:
    """The folder of conversations and their tokenizer."""
    return prefix.with_name(f"{prefix.name}-chats")


def write_tuning(prefix: Path) -> Path:
    """Write what a small job of Megatron-Bridge is fine-tuned on, and return its folder.

    Raises ``TTraceError`` when it cannot be written.
    """
    folder = chats(prefix)
    with reported(f"{folder} cannot be written", OSError):
        owned.make(prefix.parent, ignored=True)
        _write_chats(folder)
        lines = (folder / "chats.jsonl").read_text(encoding="utf-8").splitlines()
        pairs = []
        for line in lines:
            turns = {turn["role"]: turn["content"] for turn in json.loads(line)["messages"]}
            pairs.append(json.dumps({"input": turns["user"], "output": turns["assistant"]}))
        for name, texts in (("chat", lines), ("prompt", pairs)):
            owned.make(folder / name)
            owned.write(folder / name / "training.jsonl", ["\n".join(texts)])
        # What marks a checkpoint; none is read.
        owned.make(folder / START)
        owned.write(folder / START / "run_config.yaml", [])
    return folder.absolute()


def _write_chats(folder: Path) -> None:
    """Conversations of uneven length, one to four in a sample, and a tokenizer of characters."""
    owned.make(folder)
    numbers = {token: number for number, token in enumerate((*_SPECIAL, *string.printable))}
    added = [
        {"id": numbers[token], "content": token, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for token in _SPECIAL
    ]
    split = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated"}
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {**split, "invert": False},
        "model": {"type": "WordLevel", "vocab": numbers, "unk_token": _SPECIAL[0]},
    }
    configuration = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": _SPECIAL[0],
        "eos_token": _SPECIAL[1],
        "chat_template": _TEMPLATE,
    }
    owned.write(folder / "tokenizer.json", [json.dumps(tokenizer)])
    owned.write(folder / "tokenizer_config.json", [json.dumps(configuration)])
    lines = [json.dumps({"messages": messages}) for messages in _conversations()]
    owned.write(folder / "chats.jsonl", ["\n".join(lines)])


def _conversations() -> Iterator[list[dict[str, str]]]:
    random = np.random.default_rng(1)
    text = b"".join(text_data.standard_library(_BYTES)).decode("ascii", "ignore")
    at = 0
    for _ in range(_CHATS):
        messages = []
        for _ in range(random.integers(1, 5)):
            for role, most in (("system", 6), ("user", 6), ("assistant", _TURN)):
                length = int(random.integers(1, most + 1))
                messages.append({"role": role, "content": text[at : at + length].strip() or "a"})
                at += length
        yield messages


def _cut(text: bytes) -> Iterator[bytes]:
    """Pieces of random lengths, evenly spread on a logarithmic scale."""
    random = np.random.default_rng(1)
    at = 0
    while at < len(text):
        length = int(np.exp(random.uniform(np.log(_SHORTEST), np.log(_LONGEST))))
        yield text[at : at + length]
        at += length


def arguments(script: str, prefix: Path, words: Sequence[str] = ()) -> list[str]:
    """The arguments of a small job's data in ``prefix``; none where ``script`` keeps its own.

    ``words`` are the job's other arguments.
    """
    if not suits(script):
        return []
    if SFT in words:
        folder = chats(prefix)
        tokenizer = ["--tokenizer-type", "SFTTokenizer", "--tokenizer-model", str(folder)]
        # A validation set of no samples is refused here: its length is what is asked for.
        return [*tokenizer, "--data-path", str(folder / "chats.jsonl"), "--split", "100,0,0"]
    return [*text_data.training_flags(prefix), "--split", "99,1,0"]
