# SPDX-License-Identifier: Apache-2.0
"""Put a numeric fault into a real job, check it, and say whether the check noticed."""

from __future__ import annotations

import shutil
from pathlib import Path

from megatron_ttrace.evaluation.matrix.configurations import COMMON, FLAGS, MODELS
from tests.faults.field.numeric import PREAMBLE, Numeric
from tests.faults.field.rows import Row, said_wrongly
from tests.integration.jobs import SCRIPT, torchrun, ttrace


def arguments(fault: Numeric) -> list[str]:
    """Megatron's, of the fault's job."""
    words = [FLAGS.get(word, word) for word in fault.layout.split()]
    return f"{MODELS[fault.model]} {COMMON} --mock-data {' '.join(words)}".split()


def write_script(fault: Numeric, folder: Path) -> Path:
    """The training script with the patch, which only a job of several ranks makes."""
    script = folder / "fork.py"
    patch = f"if int(os.environ.get('WORLD_SIZE', '1')) > 1:\n    exec({fault.code!r})\n"
    script.write_text(f"{PREAMBLE}{patch}{SCRIPT.read_text(encoding='utf-8')}", encoding="utf-8")
    return script


def has_effect(fault: Numeric, folder: Path) -> bool:
    """Whether losses or gradient norms of three untraced steps differ in a bit."""
    logged = []
    for name in ("with", "without"):
        home = folder / name
        home.mkdir(parents=True)
        script = write_script(fault, home)
        log = "from tests.faults import training as T; from pathlib import Path\n"
        log += f"T.tell_bits(Path({str(home / 'bits.txt')!r}))\n"
        text = script.read_text(encoding="utf-8")
        text = text if name == "with" else text.replace("    exec(", "    str(")
        script.write_text(text.replace("import functools", f"{log}import functools", 1))
        mark = str(home / "mark")
        done = torchrun(fault.ranks, script, *arguments(fault), cwd=home, FIELD_MARK=mark)
        assert done.returncode == 0, done.stderr[-2000:]
        logged.append((home / "bits.txt").read_text(encoding="utf-8"))
    assert logged[0].count("\n") == 3
    return logged[0] != logged[1]


def plant(fault: Numeric, folder: Path) -> Row:
    """Check the job with the fault in it: it must diverge."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    mark = folder / "mark"
    words = ("check", "--quiet", "--ttrace-no-wandb", "--nproc-per-node", fault.ranks, "--")
    done = ttrace(
        *words,
        write_script(fault, folder),
        *arguments(fault),
        cwd=folder,
        timeout=400,
        FIELD_MARK=str(mark),
    )
    problems = [] if done.returncode == 1 else [f"exit code {done.returncode}"]
    problems += said_wrongly(done.stdout + done.stderr)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return Row(fault.id, "numeric", mark.exists(), tuple(problems), " | ".join(lines[-3:])[:600])
