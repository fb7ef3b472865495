# SPDX-License-Identifier: Apache-2.0
"""Canaries in commands and variables, which no report may show; inputs that no parser may choke on.

A row of :data:`SHOWN` is what would be written of a command; :data:`VARIABLES` are all set at once.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path

from megatron_ttrace.jobs.commands import disclosure
from megatron_ttrace.trace import owned
from tests.faults.field.rows import Row, said_wrongly
from tests.integration.jobs import SCRIPT, TINY, ttrace

CANARY = "kanarie9Qx7"
SHOWN = {
    "equals": ["train.py", f"--x-token={CANARY}"],
    "value": ["train.py", "--x-token", CANARY],
    "underscore": ["train.py", "--x_token", CANARY],
    "short": ["train.py", "-k", CANARY],
    "glued-short": ["train.py", f"-k{CANARY}"],
    "number-first": ["train.py", "--lr", "1e-3", CANARY],
    "in-a-list": ["train.py", "--data-path", "0.5", f"s3://u:{CANARY}@b/x", "0.5", "/d"],
    "in-user-name": ["train.py", "--load", f"https://{CANARY}@host/x"],
    "in-a-fragment": ["train.py", "--save", f"https://host/x#token={CANARY}"],
    "in-a-query": ["train.py", "--data-path", f"gs://b/x?sig={CANARY}"],
    "jdbc": ["train.py", "--data-path", f"jdbc:postgresql://h/d?password={CANARY}"],
    "two-addresses": ["train.py", "--data-path", f"s3://a/x,s3://u:{CANARY}@b/x"],
    "scp-style": ["train.py", "--x", f"user:{CANARY}@host:/x"],
    "json": ["train.py", "--x-headers", json.dumps({"Authorization": f"Bearer {CANARY}"})],
    "quoted": [f"TOKEN={CANARY} torchrun train.py --x-token '{CANARY}'"],
    "export": [f"export TOKEN={CANARY}; torchrun train.py"],
    "shell": ["bash", "-c", f"export TOKEN={CANARY} && torchrun train.py"],
    "login-shell": ["bash", "-lc", f"TOKEN={CANARY} torchrun train.py"],
    "heredoc": [f"cat <<EOF\n{CANARY}\nEOF"],
    "srun-export": ["srun", f"--export=ALL,TOKEN={CANARY}", "python", "train.py"],
    "docker": ["docker", "run", "--env", f"TOKEN={CANARY}", "image", "python", "train.py"],
    "mpirun": ["mpirun", "-x", f"TOKEN={CANARY}", "python", "train.py"],
    "curl": ["curl", "-H", f"Authorization: Bearer {CANARY}", "https://h"],
    "against": ["ttrace", "check", "--against", f"TOKEN={CANARY} torchrun a.py --k {CANARY}"],
    "reference-args": ["ttrace", "check", "--ttrace-reference-args", f"--x-token {CANARY}"],
    "after-a-switch": ["train.py", "--bf16", CANARY],
    "open-quote": [f"torchrun train.py '--x {CANARY}"],
    "known-with-address": ["train.py", "--tokenizer-model", f"https://u:{CANARY}@hub/x"],
    "password-with-slash": ["train.py", "--load", f"s3://u:a/{CANARY}@b/x"],
    "wandb-host": ["train.py", "--wandb-save-dir", f"https://u:{CANARY}@h"],
    "ending": ["train.py", "--", CANARY],
    "upper-case": ["train.py", "--TOKEN", CANARY],
}
VARIABLES = [
    f"{prefix}{suffix}"
    for prefix in (
        "",
        "NCCL_",
        "TORCH_",
        "MEGATRON_",
        "CUDA_",
        "SLURM_",
        "TTRACE_",
        "PET_",
        "ACME_",
    )
    for suffix in ("TOKEN", "PASSWORD", "DB_URL", "AUTHX", "KEY_ID", "COOKIE", "SIGNATURE")
]


def shown(name: str, words: list[str]) -> Row:
    """What a report would say of a command."""
    text = json.dumps(disclosure.command(words))
    problems = (f"shown in {text}",) if CANARY in text else ()
    return Row(f"secret-{name}", "secrets", True, problems, text)


def _is_private_log(path: Path) -> bool:
    """What the job itself printed, in a file that only its owner reads."""
    private = stat.S_IMODE(path.stat().st_mode) == owned.PRIVATE_FILE
    return (private and path.suffix == ".log") or path.name == "train.sh"


def written(out: Path) -> Row:
    """A check with a canary in every variable, and in the shell script that starts it."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / "tmp").mkdir()
    script = out / "train.sh"
    words = " ".join([f"--nproc-per-node 2 {SCRIPT}", *TINY, "--tensor-model-parallel-size 2"])
    os.environ["FIELD_CANARY"] = CANARY
    script.write_text(
        f"export HUB=$FIELD_CANARY\nSECRET=$FIELD_CANARY torchrun {words} "
        "--data-cache-path s3://u:$FIELD_CANARY@h/x\n"
    )
    done = ttrace(
        *("check", "--quiet", "--ttrace-no-wandb", "--", "bash", script),
        cwd=out,
        TMPDIR=str(out / "tmp"),
        TTRACE_CACHE=str(out / "cache"),
        **dict.fromkeys(VARIABLES, f"https://u:{CANARY}@h/{CANARY}"),
    )
    problems = said_wrongly(done.stdout + done.stderr)
    problems += ["printed"] if CANARY in done.stdout + done.stderr else []
    problems += [
        f"in {path.relative_to(out)}"
        for path in out.rglob("*")
        if path.is_file() and CANARY.encode() in path.read_bytes() and not _is_private_log(path)
    ]
    problems += [] if done.returncode == 0 else [f"exit code {done.returncode}"]
    return Row("secret-files", "secrets", True, tuple(problems), done.stderr[-300:])
