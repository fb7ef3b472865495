# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.findings.hunted HUNT_JSON SEED COMMIT``: add a hunt to the record.

The first line of ``hunted.jsonl`` has values of options.toml; each other line a combination, with
the numbers of its values there.
"""

import json
import re
import sys
from pathlib import Path

from megatron_ttrace.jobs import known_faults
from megatron_ttrace.jobs.shrink.command_flags import CommandFlags

RECORD = Path(__file__).with_suffix(".jsonl")
PAGE = Path(__file__).parents[2] / "docs" / "findings.md"

ERRORS = {
    "performance may degrade if MoE and tensor parallelism": "refused, in the first step",
    "(dp_cp ep tp) -> ep dp_cp tp": "finding 57",
    "has no attribute 'data_parallel_group'": "finding 57",
    "param.decoupled_grad.dtype": "finding 57",
    "Tensors must have same number of dimensions": "finding 57",
    "tensor._base is None": "finding 57",
    "'NoneType' object has no attribute 'size'": "finding 57",
    "p2p does not support sliding windows": "refused by TransformerEngine",
    "does not support attention sinks": "refused by TransformerEngine",
    "When not using pp-last rank ordering": "refused when groups are made",
    "should be divisible by config.pipeline_model_parallel_size": "four layers for eight stages",
    "a2a needs 1 heads per rank to be a multiple of 2": "refused by TransformerEngine",
    "only supported with adam": "refused when the optimizer is built",
    "param.grad.type() == 'torch.cuda.FloatTensor'": "finding 57",
    "Cannot average in collective": "refused when the model is built",
    "Partial DistOpt cannot be used without DistOpt": "refused when the optimizer is built",
    "emerging optimizer with fp16": "refused when the optimizer is built",
    "Only Adam, HybridDeviceOptimizer": "refused when the optimizer is built",
    "_collect_main_grad_data_for_unscaling": "finding 57",
    "an optimizer other than Adam: Megatron supports it only with --bf16": "finding 22",
    "most: own shard": "SOAP updates shards by themselves, by design",
    "--moe-pad-expert-input-to-capacity": "padding depends on a rank's tokens, by design",
    "has no attribute 'scale_mode'": "0.19 needs Emerging-Optimizers 0.2.0",
}
"""Why jobs have no verdict, and what is known of it."""


def read():
    """All values, and the lines by combination."""
    first, *lines = map(json.loads, RECORD.read_text(encoding="utf-8").splitlines())
    return first["values"], {frozenset(line["values"]): line for line in lines}


def number_of(heading):
    """The number of a finding; ``None`` for no finding."""
    if not heading:
        return None
    text = PAGE.read_text(encoding="utf-8")
    return int(re.search(rf"^## (\d+)\. {re.escape(heading)}", text, re.MULTILINE)[1])


def line_of(row, numbers, seed, commit):
    """What is recorded of a combination in ``hunt.json``."""
    line = {"seed": seed, "code": commit, "ranks": row["ranks"], "answer": row["answer"]}
    if row["answer"] == "equivalent":
        line["tensors"] = row["tensors"]
    elif row["answer"] == "diverged":
        options = CommandFlags.parse(row["command"].split(" -- ")[1].split()[1:]).options()
        heading = row["finding"] or known_faults.finding_of(options, "0.19.2")
        line["finding"] = number_of(heading)
    else:
        why = re.sub(r"/\S+/site-packages/", "", row["why"])
        line["error"] = re.sub(r"^rank \d+ on [^,]+, ", "", why)[:200]
    return {**line, "values": numbers}


def add(hunt, seed, commit):
    """The combinations of a hunt.json; those that are recorded stay as they are."""
    values, lines = read()
    for row in hunt["combinations"]:
        values += [value for value in row["values"].values() if value not in values]
        numbers = sorted(map(values.index, row["values"].values()))
        lines.setdefault(frozenset(numbers), line_of(row, numbers, seed, commit))
    text = "".join(f"{json.dumps(line)}\n" for line in ({"values": values}, *lines.values()))
    RECORD.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    add(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), int(sys.argv[2]), sys.argv[3])
