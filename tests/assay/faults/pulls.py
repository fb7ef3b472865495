# SPDX-License-Identifier: Apache-2.0
"""Hostile pull requests: none may be green with a fault in it, and none may read a token."""

import dataclasses
import json
from pathlib import Path

from megatron_ttrace.evaluation.bugs import catalogue
from tests.assay.faults.experiment import Experiment
from tests.assay.faults.fault import Family, Fault, Problem, Promise, text
from tests.assay.faults.processes import Command, Started
from tests.evaluation.recipes.test_recipes import MODEL
from tests.integration.test_checkout import make_checkout
from tests.jobs.processes.test_worktrees import git

CANARY = "kanarieCi44"
LAYERS = "megatron/core/tensor_parallel/layers.py"
_RECIPE = "ci/tp2.yaml"
_STEAL = """
import os, subprocess
from pathlib import Path
FOUND = [v for v in os.environ.values() if "kanarieCi44" in v]
for name in ("/proc/%d/environ" % os.getppid(), "/proc/1/environ"):
    try:
        FOUND += [name] * (b"kanarieCi44" in Path(name).read_bytes())
    except OSError:
        pass
if FOUND:
    Path("STOLEN").write_text(repr(FOUND))
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Pull:
    """A pull request with a bug, and what else it does.

    Attributes:
        files: what it writes; ``None`` removes a file.
        records: what somebody wrote to the CI's working directory.
        steals: whether its code looks for the CI's token.
    """

    files: tuple[tuple[str, str | None], ...] = ()
    records: str = ""
    steals: bool = False

    def inject(self, experiment: Experiment) -> None:
        """Check the pull request as a CI would."""
        x, x.injected = experiment, True
        root, stolen = x.home / "fork", x.home / "stolen"
        git(x.home, "clone", "-q", str(x.base.folder / "fork"), "fork")
        git(root, "checkout", "-q", "-B", "pull")
        (patch,) = catalogue.find(catalogue.load_catalogue(), "01").patches
        before, after = patch.fragment, patch.replacement
        if not x.fault.faulty:
            before = "output_parallel[input_mask, :] = 0.0"
            after = "output_parallel[input_mask] = 0.0"
        layers = root / LAYERS
        layers.write_text(layers.read_text().replace(before, after, 1))
        if self.steals:
            (root / "beside.py").write_text(_STEAL.replace('"STOLEN"', repr(str(stolen))))
        for name, content in self.files:
            if content is None:
                (root / name).unlink()
            else:
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(content)
        git(root, "add", "-A")
        git(root, "commit", "-q", "-m", "pull")
        if self.records:
            (x.home / "ttrace-ci").mkdir()
            (x.home / "ttrace-ci" / "reached.json").write_text(self.records)
        words = ("ci", str(root), "--base", "main", "--recipes", "ci", "--format", "github")
        variables = {"GITHUB_TOKEN": CANARY, "ACME_X": CANARY}
        command = Command(words=words, home=x.home, variables=variables, cold=True)
        x.watch(Started(command), limit=500, report=False, is_check=False)
        if stolen.exists():
            x.problem(Problem.SECRET, f"stole {stolen.read_text()[:200]}")
        stdout, stderr = (text(command.output(stream)) for stream in ("stdout", "stderr"))
        if CANARY in stdout + stderr:
            x.problem(Problem.SECRET, "printed the token")
        commands = [line for line in stdout.splitlines() if line.startswith("::")]
        allowed = ("::error", "::warning", "::notice", "::group", "::endgroup")
        if any(
            not c.startswith(allowed) or "file=x" in c.partition("::")[2][:14] for c in commands
        ):
            x.problem(Problem.CONTROL, f"a forged command {json.dumps(commands)[:300]}")


def _recipe(**changes: object) -> str:
    words = {**MODEL, "--tensor-model-parallel-size": 2, "--num-layers": 2, **changes}
    return "MODEL_ARGS:\n" + "".join(f"  {k}: {str(v).lower()}\n" for k, v in words.items())


def _pull(
    name: str, files: tuple[tuple[str, str | None], ...] = (), *, faulty: bool = True, **more
) -> Fault:
    promise = Promise((1, 2) if faulty else (0,), verdict=False)
    return Fault(name, Family.PULLS, Pull(files, **more), promise, faulty)


FAULTS = (
    _pull("ci-recipe-removed", ((_RECIPE, None),)),
    _pull("ci-recipe-renamed", ((_RECIPE, None), ("ci/other.yaml", _recipe()))),
    _pull("ci-recipe-broken", ((_RECIPE, "MODEL_ARGS: [\n"),)),
    _pull("ci-recipe-trivial", ((_RECIPE, _recipe(**{"--tensor-model-parallel-size": 1})),)),
    _pull("ci-recipe-is-no-training", ((_RECIPE, "MODE: inference\n" + _recipe()),)),
    _pull("ci-recipe-empty", ((_RECIPE, ""),)),
    _pull("ci-forged-records", records='{"head": {}, "base": {}}'),
    _pull("ci-forged-list", records="[]"),
    _pull(
        "ci-workflow-command-in-a-name",
        (("ci/a\n::error file=x::y.yaml", "MODEL_ARGS: [\n"), ("ci/::add-mask::z.yaml", "x: [")),
    ),
    _pull("ci-steals-a-token", steals=True),
    _pull("ci-quiet-exit", (("beside.py", "import os\nos._exit(0)\n"),)),
    _pull("ci-harmless", faulty=False),
)


def prepare(root: Path) -> None:
    """A fork with one recipe of two ranks."""
    make_checkout(root)
    (root / "ci").mkdir()
    (root / _RECIPE).write_text(_recipe())
    git(root, "init", "-q", "-b", "main")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "a fork")
