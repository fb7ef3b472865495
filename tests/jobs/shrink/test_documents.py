# SPDX-License-Identifier: Apache-2.0
"""Data of small jobs: conversations."""

import json
import string

from megatron_ttrace.jobs.shrink import documents


def test_conversations(tmp_path):
    """Three turns each, some in one sample, of characters that the tokenizer knows."""
    prefix = documents.write(tmp_path / "text", ("--bf16", "--sft"))
    words = documents.arguments("pretrain_gpt.py", prefix, ("--sft",))
    values = dict(zip(words[::2], words[1::2], strict=True))
    with open(values["--data-path"], encoding="utf-8") as file:
        samples = [json.loads(line)["messages"] for line in file]
    roles = {tuple(message["role"] for message in sample) for sample in samples}
    assert roles == {("system", "user", "assistant") * count for count in (1, 2, 3, 4)}
    contents = [message["content"] for sample in samples for message in sample]
    assert all(contents)
    assert set("".join(contents)) <= set(string.printable)
    assert len(set(map(len, contents))) > 10


def test_text_alone(tmp_path):
    """Nothing else is written; git ignores a new directory, one that is there is the user's."""
    documents.write(tmp_path / "made" / "text")
    prefix = documents.write(tmp_path / "text")
    assert {path.name for path in tmp_path.glob("[!.]*")} == {"made", "text.bin", "text.idx"}
    assert (tmp_path / "made" / ".gitignore").read_text(encoding="utf-8") == "*\n"
    assert not (tmp_path / ".gitignore").exists()
    assert "SFTTokenizer" not in documents.arguments("pretrain_gpt.py", prefix, ("--bf16",))
