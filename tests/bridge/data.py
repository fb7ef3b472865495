# SPDX-License-Identifier: Apache-2.0
"""Sizes of a model; a tokenizer and sums to learn, as files, for fine-tuning."""

import json
from pathlib import Path

LENGTH = 32
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": LENGTH,
}
"""Sizes, in the words of ``transformers``."""
SPECIAL = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}


def write(home: Path) -> None:
    """One token for each character; inputs and outputs of different lengths."""
    words = [*SPECIAL.values(), *map(chr, range(32, 127))]
    added = [
        {"id": index, "content": word, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for index, word in enumerate(SPECIAL.values())
    ]
    split = {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": split,
        "model": {
            "type": "WordLevel",
            "vocab": {word: index for index, word in enumerate(words)},
            "unk_token": SPECIAL["unk_token"],
        },
    }
    folder = home / "tokenizer"
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    sums = [(4**small, 10**large) for small in range(4) for large in range(4)]
    lines = [{"input": f"{a} + {b} =", "output": str(a + b)} for a, b in sums]
    (home / "training.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
