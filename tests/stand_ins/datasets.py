# SPDX-License-Identifier: Apache-2.0
"""``datasets``, as far as Megatron's SFTDataset uses it."""

import json
from pathlib import Path


def load_dataset(kind, *, data_files, split):
    """All lines of one JSON file."""
    assert (kind, split) == ("json", "all")
    return [json.loads(line) for line in Path(data_files).read_text(encoding="utf-8").splitlines()]
