# SPDX-License-Identifier: Apache-2.0
"""A run that was kept takes the place of the reference."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from megatron_ttrace.evaluation.matrix.configurations import arguments_of
from tests import programs
from tests.integration.jobs import PP, ROOT, SCRIPT, TINY, TP, ttrace

SMALL = [*TINY, "--ttrace-seeds", "2", "--ttrace-no-wandb"]


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Path:
    """Two tensor-parallel ranks."""
    home = tmp_path_factory.mktemp("kept")
    cache = str(home / "references")
    words = ("record", "--nproc-per-node", 2, "--ttrace-dir", home / "tp", "--", SCRIPT, *SMALL)
    done = ttrace(*words, *TP, cwd=home, TTRACE_CACHE=cache, code=0)
    assert "tensors; compared with its own single-device reference: equivalent" in done.stdout
    assert not (home / "tp" / "reference").is_symlink()
    return home


def against(kept: Path, cwd: Path, *job: object, code: int) -> dict[str, Any]:
    """The answer of ``ttrace check --against`` of a job with two ranks."""
    words = ("check", "--json", "--nproc-per-node", 2, "--against", kept / "tp", "--", SCRIPT)
    cache = str(kept / "references")
    done = ttrace(*words, *SMALL, *job, cwd=cwd, code=code, TTRACE_CACHE=cache)
    return json.loads(done.stdout)


def test_another_layout(kept: Path, tmp_path: Path) -> None:
    """Two pipeline stages compute what two tensor-parallel ranks do; all of it is compared."""
    summary = against(kept, tmp_path, *PP, code=0)
    log = tmp_path / "ttrace-out" / "logs" / "rank-00000.log"
    assert "using the reference made earlier" in log.read_text()  # with the other layout
    assert set(summary["counts"]) == {"pass"}
    assert summary["counts"]["pass"] > 400
    written = json.loads((tmp_path / "ttrace-out" / "summary.json").read_text())
    assert (written["run"], written["notices"]) == (summary["run"], summary["notices"])
    assert "equivalent with its own reference); compared with it is" in written["notices"][0]
    done = ttrace("diff", "--json", kept / "tp", "ttrace-out", cwd=tmp_path)
    # The report in ttrace-out is not that of its own reference.
    again = json.loads(done.stdout)
    assert again["notices"][0].count("own reference") == 1
    assert again["counts"] == summary["counts"]


def test_a_fault_in_one_run(kept: Path, tmp_path: Path) -> None:
    """Found where it is, though the run that it is compared with has two ranks as well."""
    summary = against(kept, tmp_path, *TP, "--ttrace-bug", "01", code=1)
    assert summary["culprits"][0]["name"] == "embedding.word_embeddings"


CONFIGURATIONS = (
    *("gpt tp2", "gpt pp2", "gpt tp2 sp --bf16", "gpt-te cp2", "gpt zero", "gpt zero overlap"),
    *("llama tp2", "moe ep2 alltoall"),
)
"""Models and words of the matrix."""
FAULT = """\
from megatron.core.transformer.attention import SelfAttention

forward = SelfAttention.forward


def scaled(self, *args, **kwargs):
    output, bias = forward(self, *args, **kwargs)
    return output * 1.5, bias


SelfAttention.forward = scaled
"""


@pytest.fixture(scope="module")
def release() -> str:
    """The folder of megatron-core 0.18.2."""
    done = programs.run(ROOT / "launch" / "bootstrap.sh", "release", "0.18.2", timeout=600)
    if done.returncode:
        pytest.skip(f"megatron-core 0.18.2 cannot be had: {done.stderr[-200:]}")
    return done.stdout.splitlines()[-1]


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("job", CONFIGURATIONS)
def test_two_releases(release: str, tmp_path: Path, job: str) -> None:
    """What differs between 0.18.2 and 0.19.2 is explained; a fault in one is the only new one."""
    faulty = tmp_path / "pretrain_faulty.py"
    text = SCRIPT.read_text()
    assert "if __name__" in text
    faulty.write_text(text.replace("if __name__", f"{FAULT}\nif __name__", 1))
    model, _, words = job.partition(" ")
    arguments = arguments_of(model, f"{words} --mock-data --ttrace-seeds 2 --ttrace-no-wandb")
    new = f"torchrun --nproc-per-node 2 {SCRIPT} {' '.join(arguments)}"
    old = f"PYTHONPATH={os.pathsep.join([str(ROOT), release])} {new}"
    ttrace("diff", "--json", old, new, cwd=tmp_path, timeout=600, code=0)
    broken = new.replace(str(SCRIPT), str(faulty))
    done = ttrace(
        *("diff", "--json", "--directory", "faulty", "ttrace-diff/a", broken),
        cwd=tmp_path,
        timeout=600,
        code=1,
    )
    culprits = json.loads(done.stdout)["culprits"]
    forward = {one["name"] for one in culprits if one["direction"] == "forward"}
    assert {name.rpartition(".")[2] for name in forward} == {"self_attention"}
