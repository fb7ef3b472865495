# SPDX-License-Identifier: Apache-2.0
"""Hostile pull requests: none may be green with a fault in it, and none may read a token."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

from megatron_ttrace.evaluation.bugs import catalogue
from tests.evaluation.recipes.test_recipes import MODEL
from tests.faults.field.rows import Row, said_wrongly
from tests.integration.jobs import ttrace
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
class Hostile:
    """A pull request with a bug, and what else it does.

    Attributes:
        files: what it writes; ``None`` removes a file.
        records: what somebody wrote to the CI's working directory.
        steals: whether its code looks for the CI's token.
        faulty: whether it has the bug: then it must not be green.
    """

    id: str
    files: tuple[tuple[str, str | None], ...] = ()
    records: str = ""
    steals: bool = False
    faulty: bool = True


def _recipe(**changes: object) -> str:
    words = {**MODEL, "--tensor-model-parallel-size": 2, "--num-layers": 2, **changes}
    return "MODEL_ARGS:\n" + "".join(f"  {k}: {str(v).lower()}\n" for k, v in words.items())


PULLS = (
    Hostile("ci-recipe-removed", ((_RECIPE, None),)),
    Hostile("ci-recipe-renamed", ((_RECIPE, None), ("ci/other.yaml", _recipe()))),
    Hostile("ci-recipe-broken", ((_RECIPE, "MODEL_ARGS: [\n"),)),
    Hostile("ci-recipe-trivial", ((_RECIPE, _recipe(**{"--tensor-model-parallel-size": 1})),)),
    Hostile("ci-recipe-is-no-training", ((_RECIPE, "MODE: inference\n" + _recipe()),)),
    Hostile("ci-recipe-empty", ((_RECIPE, ""),)),
    Hostile("ci-forged-records", records='{"head": {}, "base": {}}'),
    Hostile("ci-forged-list", records="[]"),
    Hostile(
        "ci-workflow-command-in-a-name",
        (("ci/a\n::error file=x::y.yaml", "MODEL_ARGS: [\n"), ("ci/::add-mask::z.yaml", "x: [")),
    ),
    Hostile("ci-steals-a-token", steals=True),
    Hostile("ci-quiet-exit", (("beside.py", "import os\nos._exit(0)\n"),)),
    Hostile("ci-harmless", faulty=False),
)


def prepare(root: Path) -> None:
    """A fork with one recipe of two ranks."""
    make_checkout(root)
    (root / "ci").mkdir()
    (root / _RECIPE).write_text(_recipe())
    git(root, "init", "-q", "-b", "main")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "a fork")


def pull(hostile: Hostile, root: Path, folder: Path) -> Row:
    """Check the pull request as a CI would."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    git(root, "checkout", "-q", "main")
    git(root, "checkout", "-q", "-B", hostile.id)
    (patch,) = catalogue.find(catalogue.load_catalogue(), "01").patches
    file = root / LAYERS
    fragment, other = patch.fragment, patch.replacement
    if not hostile.faulty:
        fragment = "output_parallel[input_mask, :] = 0.0"
        other = "output_parallel[input_mask] = 0.0"
    file.write_text(file.read_text().replace(fragment, other, 1))
    if hostile.steals:
        stolen = folder / "stolen"
        (root / "beside.py").write_text(_STEAL.replace('"STOLEN"', repr(str(stolen))))
    for name, text in hostile.files:
        if text is None:
            (root / name).unlink()
        else:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", hostile.id)
    if hostile.records:
        (folder / "ttrace-ci").mkdir()
        (folder / "ttrace-ci" / "reached.json").write_text(hostile.records)
    words = ("ci", root, "--base", "main", "--recipes", "ci", "--format", "github")
    done = ttrace(*words, cwd=folder, timeout=500, cold=True, GITHUB_TOKEN=CANARY, ACME_X=CANARY)
    problems = said_wrongly(done.stdout + done.stderr)
    if done.returncode not in ((1, 2) if hostile.faulty else (0,)):
        problems.append(f"exit code {done.returncode}")
    if (folder / "stolen").exists():
        problems.append(f"stole {(folder / 'stolen').read_text()[:200]}")
    if CANARY in done.stdout + done.stderr:
        problems.append("printed the token")
    commands = [line for line in done.stdout.splitlines() if line.startswith("::")]
    allowed = ("::error", "::warning", "::notice", "::group", "::endgroup")
    if any(not c.startswith(allowed) or "file=x" in c.partition("::")[2][:14] for c in commands):
        problems.append(f"a forged command {json.dumps(commands)[:300]}")
    said = f"exit code {done.returncode}: {done.stdout[-200:]} {done.stderr[-200:]}"
    return Row(hostile.id, "pull requests", True, tuple(problems), said)


if __name__ == "__main__":
    import sys

    OUT = Path(sys.argv[1]).resolve()
    shutil.rmtree(OUT, ignore_errors=True)
    prepare(OUT / "fork")
    for one in PULLS:
        if len(sys.argv) < 3 or one.id in sys.argv[2:]:
            print(pull(one, OUT / "fork", OUT / one.id), flush=True)
