# SPDX-License-Identifier: Apache-2.0
"""A rank of a job with a mutant in it, or with its lines recorded; else ``pretrain_gpt.py``.

What is done is done here, before the training script starts, and then forgotten: flags, arguments
and environment of the run are those of any other, so nothing that checks it, and no reference that
it starts, can know.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

from megatron_ttrace.evaluation.mutants import coverage
from megatron_ttrace.evaluation.mutants.records import Mutant, Span
from megatron_ttrace.evaluation.mutants.scan import modules
from megatron_ttrace.evaluation.mutants.swap import introduce
from megatron_ttrace.resources import launch_dir

MUTANT = "MUTANT_TO_INTRODUCE"
"""Environment variable: a mutant, as JSON."""
COVERAGE = "MUTANT_TO_INTRODUCE_LINES"
"""Environment variable: folder for a file of lines per rank."""


def encode(mutant: Mutant) -> str:
    """A mutant as text."""
    span = mutant.span
    lines = [span.first_line, span.first_column, span.last_line, span.last_column]
    words = (mutant.id, mutant.module, mutant.qualname, mutant.operator)
    return json.dumps([*words, lines, mutant.fragment, mutant.replacement])


def decode(text: str) -> Mutant:
    """The mutant that :func:`encode` wrote."""
    name, module, qualname, operator, span, fragment, replacement = json.loads(text)
    return Mutant(name, module, qualname, operator, Span(*span), fragment, replacement)


def main() -> None:
    """Prepare this process and train."""
    mutant = os.environ.pop(MUTANT, None)
    lines = os.environ.pop(COVERAGE, None)
    script = launch_dir() / "pretrain_gpt.py"
    # Whoever starts a reference run starts what is here.
    sys.argv[0] = str(script)
    sys.path.insert(0, str(script.parent))
    if mutant is not None:
        introduce(decode(mutant))
    if lines is not None:
        files = (path for _, path in modules())
        coverage.record(files, Path(lines) / f"rank-{os.environ['RANK']}.jsonl")
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
