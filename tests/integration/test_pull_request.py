# SPDX-License-Identifier: Apache-2.0
"""Pull requests to a fork: a known bug fails with its place, a harmless one passes."""

from pathlib import Path

import pytest

from megatron_ttrace.evaluation.bugs import catalogue
from tests.evaluation.recipes.test_recipes import MODEL
from tests.integration.jobs import ttrace
from tests.integration.test_checkout import make_checkout
from tests.jobs.processes.test_worktrees import commit, git

LAYERS = "megatron/core/tensor_parallel/layers.py"
EXPERTS = "megatron/core/transformer/moe/moe_utils.py"
HARMLESS = ("output_parallel[input_mask, :] = 0.0", "output_parallel[input_mask] = 0.0")
UNREACHED = (
    "    return probs, top_indices",
    "    probs = probs + 0\n    return probs, top_indices",
)
TOKEN = "kanarieCi44"
THIEF = """
import os
from pathlib import Path
for name in ("/proc/self/environ", "/proc/%d/environ" % os.getppid(), "/proc/1/environ"):
    try:
        if b"kanarieCi44" in Path(name).read_bytes():
            Path("STOLEN").touch()
    except OSError:
        pass
"""


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_pull_requests(tmp_path: Path) -> None:
    """A harmless change that runs, one that does not run, a known bug, and hostile ones with it."""
    root = tmp_path / "fork"
    make_checkout(root)
    arguments = {**MODEL, "--tensor-model-parallel-size": 2, "--num-layers": 2}
    recipe = root / "ci" / "tp2.yaml"
    recipe.parent.mkdir()
    lines = (f"  {flag}: {str(value).lower()}\n" for flag, value in arguments.items())
    recipe.write_text("MODEL_ARGS:\n" + "".join(lines))
    commit(root, "a fork")

    def pull(
        branch: str, file: str, fragment: str, replacement: str, beside: str = ""
    ) -> tuple[int, str]:
        """Commit a change to ``main`` and check it: the exit code and what is printed."""
        git(root, "checkout", "-q", "-B", branch, "main")
        text = (root / file).read_text()
        assert fragment in text
        (root / file).write_text(text.replace(fragment, replacement, 1))
        if beside:
            (root / "beside.py").write_text(beside)
        git(root, "commit", "-q", "--allow-empty", "-a", "-m", branch)
        words = ("ci", root, "--base", "main", "--recipes", "ci", "--format", "github")
        done = ttrace(*words, cwd=tmp_path, timeout=600, cold=True, GITHUB_TOKEN=TOKEN)
        assert done.returncode in (0, 1) or beside, done.stdout[-3000:] + done.stderr[-3000:]
        assert TOKEN not in done.stdout + done.stderr
        return done.returncode, done.stdout

    # As after a push to the default branch: its records are what pull requests are compared with.
    code, said = pull("main-again", LAYERS, HARMLESS[0], HARMLESS[0])
    assert code == 0
    assert "checking: ci/tp2.yaml" in said

    code, said = pull("harmless", LAYERS, *HARMLESS)
    assert code == 0
    assert "equivalent: ci/tp2.yaml" in said
    assert "::error" not in said

    code, said = pull("experts", EXPERTS, *UNREACHED)
    assert code == 0
    assert "skipped: ci/tp2.yaml" in said
    assert "checking:" not in said
    assert f"::warning file={EXPERTS}," in said

    (patch,) = catalogue.find(catalogue.load_catalogue(), "01").patches
    code, said = pull("faulty", LAYERS, patch.fragment, patch.replacement)
    assert code == 1
    assert "equivalent before the pull request: ci/tp2.yaml" in said
    errors = [line for line in said.splitlines() if line.startswith("::error ")]
    assert errors
    assert errors[0].startswith(f"::error file={LAYERS},line=")
    assert "embedding.word_embeddings" in errors[0]
    line = int(errors[0].partition("line=")[2].partition(",")[0])
    own = (root / LAYERS).read_text().splitlines()
    at = own.index("            # The ids are shifted already, the bounds are not.") + 1
    assert abs(line - at) <= 6

    # Code that looks for the token of the CI, and code that ends the job quietly.
    stolen = tmp_path / "stolen"
    thief = THIEF.replace('"STOLEN"', repr(str(stolen)))
    code, _ = pull("thief", LAYERS, patch.fragment, patch.replacement, thief)
    assert code == 1
    assert not stolen.exists()
    code, _ = pull(
        *("quiet", LAYERS, patch.fragment, patch.replacement), "import os\nos._exit(0)\n"
    )
    assert code != 0
