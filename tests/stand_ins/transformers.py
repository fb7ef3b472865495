# SPDX-License-Identifier: Apache-2.0
"""``transformers``, as far as Megatron's SFTTokenizer uses it: one token per character."""

import json
import re
from pathlib import Path

import jinja2


class AutoTokenizer:
    """A tokenizer from its two files."""

    def __init__(self, folder):
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        self._numbers = model["model"]["vocab"]
        special = "|".join(re.escape(one["content"]) for one in model["added_tokens"])
        self._token = re.compile(f"{special}|{model['pre_tokenizer']['pattern']['Regex']}")
        self.eos_token_id = self._numbers[settings["eos_token"]]
        self.chat_template = settings["chat_template"]
        self.pad_token_id = self.bos_token_id = None

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path):
        """From a folder."""
        return cls(Path(pretrained_model_name_or_path))

    def __len__(self):
        return len(self._numbers)

    def convert_tokens_to_ids(self, token):
        """The number of a token."""
        return self._numbers[token]

    def apply_chat_template(self, conversation, *, chat_template, **_):
        """The numbers of a conversation's tokens."""
        text = jinja2.Template(chat_template).render(messages=conversation)
        return [self._numbers[token] for token in self._token.findall(text)]
