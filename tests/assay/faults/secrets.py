# SPDX-License-Identifier: Apache-2.0
"""A canary in commands and variables, which nothing that a check writes may show."""

import dataclasses
import stat
from pathlib import Path

from megatron_ttrace.trace import owned
from tests.assay.faults.experiment import Experiment
from tests.assay.faults.fault import Family, Fault, Problem, Promise, text
from tests.assay.faults.processes import Command, Started
from tests.integration.jobs import SCRIPT, TINY

CANARY = "kanarie9Qx7"
VARIABLES = [
    f"{prefix}{suffix}"
    for prefix in (
        *("", "NCCL_", "TORCH_", "MEGATRON_", "CUDA_"),
        *("SLURM_", "TTRACE_", "PET_", "ACME_"),
    )
    for suffix in ("TOKEN", "PASSWORD", "DB_URL", "AUTHX", "KEY_ID", "COOKIE", "SIGNATURE")
]


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


FAULTS = (Fault("secret-files", Family.SECRETS, Written(tuple(VARIABLES)), Promise(())),)
