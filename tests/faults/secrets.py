# SPDX-License-Identifier: Apache-2.0
"""Canaries in commands and variables, which no report may show; inputs that no parser may choke on.

A row of :data:`SHOWN` is what would be written of a command; :data:`VARIABLES` are all set at once.
"""

from __future__ import annotations

import dataclasses
import json
import stat
from pathlib import Path

from megatron_ttrace.jobs.commands import disclosure
from megatron_ttrace.trace import owned
from tests.faults.experiment import Experiment
from tests.faults.fault import Family, Fault, Problem, Promise, text
from tests.faults.processes import Command, Started
from tests.integration.jobs import SCRIPT, TINY

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


@dataclasses.dataclass(frozen=True, slots=True)
class Shown:
    """A command, as a report would show it."""

    words: tuple[str, ...]

    def inject(self, experiment: Experiment) -> None:
        """Show it."""
        x, x.injected = experiment, True
        x.said = json.dumps(disclosure.command(self.words))
        if CANARY in x.said:
            x.problem(Problem.SECRET, x.said)


@dataclasses.dataclass(frozen=True, slots=True)
class Written:
    """A check with a canary in every variable, and in the shell script that starts it."""

    variables: tuple[str, ...]

    def inject(self, experiment: Experiment) -> None:
        """Search all that it printed and wrote."""
        x, x.injected = experiment, True
        (x.home / "tmp").mkdir()
        words = " ".join([f"--nproc-per-node 2 {SCRIPT}", *TINY, "--tensor-model-parallel-size 2"])
        (x.home / "train.sh").write_text(
            f"export HUB=$FIELD_CANARY\nSECRET=$FIELD_CANARY torchrun {words} "
            "--data-cache-path s3://u:$FIELD_CANARY@h/x\n"
        )
        command = Command(
            words=("check", "--quiet", "--ttrace-no-wandb", "--", "bash", "train.sh"),
            home=x.home,
            variables={
                "FIELD_CANARY": CANARY,
                "TMPDIR": str(x.home / "tmp"),
                "TTRACE_CACHE": str(x.home / "cache"),
                **dict.fromkeys(self.variables, f"https://u:{CANARY}@h/{CANARY}"),
            },
        )
        x.watch(Started(command), report=False)
        if CANARY in "".join(text(command.output(stream)) for stream in ("stdout", "stderr")):
            x.problem(Problem.SECRET, "printed")
        for path in x.home.rglob("*"):
            if path.is_file() and CANARY.encode() in path.read_bytes() and not _is_private(path):
                x.problem(Problem.SECRET, f"in {path.relative_to(x.home)}")


def _is_private(path: Path) -> bool:
    """What the job itself printed, in a file that only its owner reads."""
    private = stat.S_IMODE(path.stat().st_mode) == owned.PRIVATE_FILE
    return (private and path.suffix == ".log") or path.name == "train.sh"


FAULTS = (
    *(
        Fault(f"secret-{name}", Family.SECRETS, Shown(tuple(words)))
        for name, words in SHOWN.items()
    ),
    Fault("secret-files", Family.SECRETS, Written(tuple(VARIABLES)), Promise(())),
)
