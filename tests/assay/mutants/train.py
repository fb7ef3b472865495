# SPDX-License-Identifier: Apache-2.0
"""The training script of a campaign: another one with a mutant, or with lines recorded.

The mutant is put in before the training script starts, and its name is removed from the process.
Flags, arguments and environment are those of any other run, so neither the checker nor a reference
that the run starts can know of it.
"""

import json
import os
import runpy
import sys
from pathlib import Path
from types import CodeType, FunctionType

# A rank starts with this folder as its path, as any script does.
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from megatron_ttrace.evaluation.bugs import patching
from megatron_ttrace.trace import codec
from megatron_ttrace.trace.errors import TTraceError
from tests.assay.mutants import coverage, outcome, truth
from tests.assay.mutants.records import Mutant
from tests.assay.mutants.scan import autograd_files, modules
from tests.assay.mutants.source import Source

MUTANT = "MUTANT_TO_INTRODUCE"
"""Environment variable: a mutant, as JSON."""
COVERAGE = "MUTANT_TO_INTRODUCE_LINES"
"""Environment variable: folder for one file of lines per rank."""
STATE = "MUTANT_TO_INTRODUCE_STATE"
"""Environment variable: folder for one file per rank with what training ends with."""
SCRIPT = "MUTANT_TO_INTRODUCE_SCRIPT"
"""Environment variable: path of the training script."""


def encode(mutant: Mutant) -> str:
    """A mutant as text, for :data:`MUTANT`."""
    return json.dumps(codec.encode(mutant))


def decode(text: str) -> Mutant:
    """The mutant that :func:`encode` wrote."""
    return codec.decode(Mutant, codec.parse(text))


def introduce(mutant: Mutant) -> list[tuple[FunctionType, CodeType]]:
    """Put a mutant into this process; returns the changed function with its former code.

    Raises:
        TTraceError: when the installed Megatron has other code at this place.
    """

    def change(text: str, path: Path) -> str:
        source = Source(mutant.module, text)
        if source.between(mutant.span) != mutant.fragment:
            raise TTraceError(f"{mutant.id}: {path} is not the file in which it was found")
        return source.replace(mutant.span, mutant.replacement)

    return patching.rewrite(mutant.module, change, "a mutant")


def main() -> None:
    """Prepare this process and train."""
    mutant = os.environ.pop(MUTANT, None)
    lines = os.environ.pop(COVERAGE, None)
    state = os.environ.pop(STATE, None)
    script = Path(os.environ.pop(SCRIPT))
    # The reference runs the program that is named here.
    sys.argv[0] = str(script)
    sys.path.insert(0, str(script.parent))
    if mutant is not None:
        introduce(decode(mutant))
    if lines is not None:
        files = dict.fromkeys(map(str, autograd_files())) | {
            str(path): truth.phase_of(module) for module, path in modules()
        }
        coverage.record(files, Path(lines) / f"rank-{os.environ['RANK']}.jsonl")
    told = None if state is None else outcome.watch()
    runpy.run_path(str(script), run_name="__main__")
    if told is not None:
        file = Path(str(state)) / f"rank-{os.environ['RANK']}.txt"
        file.write_text("\n".join(told()), encoding="utf-8")


if __name__ == "__main__":
    main()
