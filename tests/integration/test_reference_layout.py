# SPDX-License-Identifier: Apache-2.0
"""A reference on several ranks: healthy runs are equivalent to it, faulty ones are not."""

import json
import statistics
from pathlib import Path

import pytest

from megatron_ttrace.compare import tolerance
from megatron_ttrace.compare.measure import measure, relative_error
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.trace.records import Kind
from megatron_ttrace.trace.store import TraceReader
from tests.integration.jobs import SCRIPT, TINY, our_lines, ttrace

JOB = (*TINY, "--num-layers", 4)
TP = ("--tensor-model-parallel-size", 4)
LLAMA = (
    *"--transformer-impl transformer_engine --swiglu --normalization RMSNorm".split(),
    *"--group-query-attention --num-query-groups 2 --position-embedding-type rope".split(),
    *"--disable-bias-linear --global-batch-size 8 --use-distributed-optimizer".split(),
    *"--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2".split(),
)

FAULTY = f"""
import os
import torch
import megatron_ttrace
megatron_ttrace.enable()
from megatron.core.transformer.mlp import MLP
forward = MLP.forward
def faulty(self, *args, **kwargs):
    output, bias = forward(self, *args, **kwargs)
    return output * (FACTOR if CONDITION else 1.0), bias
MLP.forward = faulty
exec(compile(open({str(SCRIPT)!r}).read(), {str(SCRIPT)!r}, "exec"))
"""
"""Megatron with a fault; ``runpy`` would set another ``sys.argv[0]``, which the reference runs."""


def check(home: Path, *flags, script=SCRIPT, nproc=4, arguments=TP):
    """Check the job; what was said, and the answer if there is one."""
    options = ("--ttrace-no-wandb", "--ttrace-dir", home / "out", *flags)
    words = ("--nproc-per-node", nproc, *options, "--", script, *JOB, *arguments)
    done = ttrace("check", *words, cwd=home)
    summary = home / "out" / "summary.json"
    return done, json.loads(summary.read_text()) if done.returncode != 2 else {}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """A directory with a finished check, and its answer."""
    home = tmp_path_factory.mktemp("layout")
    done, summary = check(home, "--ttrace-reference-layout", "tp=2")
    assert done.returncode == 0, done.stdout + done.stderr
    return home, summary


def test_a_healthy_run(healthy):
    """It is equivalent, everything was judged, and the report says what the reference was."""
    home, summary = healthy
    assert list(summary["counts"]) == ["pass"]
    told = "reference: tp=2 on 2 ranks, itself checked against one device on a shrunk job"
    assert told in summary["notices"]
    assert summary["exactness"]["expected"] == 0
    trial = json.loads((home / "out" / "layout" / "summary.json").read_text())
    assert (trial["verdict"], trial["config"]["tp"]) == ("equivalent", 2)
    assert "single device" not in (home / "out" / "report.html").read_text()
    reference = home / "out" / "reference"
    assert json.loads((reference / "meta.json").read_text())["layout"] == {
        "tp": 2,
        "pp": 1,
        "cp": 1,
    }
    assert not [path for path in reference.iterdir() if path.is_dir()]


def test_a_known_bug(healthy):
    """The reference is used again; the bug of one layout is not in the other."""
    done, summary = check(healthy[0], "--ttrace-reference-layout", "tp=2", "--ttrace-bug", "01")
    assert done.returncode == 1, done.stdout + done.stderr
    assert summary["culprits"][0]["name"] == "embedding.word_embeddings"
    assert "using the reference made earlier" in done.stdout + done.stderr


def test_no_layout(tmp_path):
    """One line, before anything starts."""
    done, _ = check(tmp_path, "--ttrace-reference-layout", "tp=2 ep=2")
    assert done.returncode == 2
    (line,) = our_lines(done.stderr)
    assert line.endswith("'tp=2 ep=2': a reference can be divided along tp, pp, cp, not ep")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("factor", "condition", "says"),
    [
        (
            "1.01",
            "torch.distributed.get_world_size() > 1",
            "on a shrunk job this layout is not equivalent to one device",
        ),
        (
            "1 + 2**-20",
            "output.shape[-1] == 32 and os.environ['RANK'] == '1'",
            "merging the shards: the reference's ranks 1 and others have other bits in "
            "decoder.layers.0.mlp ",
        ),
    ],
    ids=["small", "large"],
)
def test_a_reference_that_is_wrong_itself(tmp_path, factor, condition, says):
    """In every size, or only in the full one, where replicas differ: there is no verdict."""
    script = tmp_path / "faulty.py"
    script.write_text(FAULTY.replace("FACTOR", factor).replace("CONDITION", condition))
    done, _ = check(tmp_path, "--ttrace-reference-layout", "tp=2", script=script)
    assert done.returncode == 2
    assert says in done.stdout + done.stderr
    assert not (tmp_path / "out" / "reference").exists()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("layout", "more"),
    [
        ("tp=2 pp=2", ("--bf16",)),
        ("pp=2 cp=2", ("--fp16", "--untie-embeddings-and-output-weights")),
    ],
)
def test_four_ranks(tmp_path, layout, more):
    """In 16 bits; the candidate has other axes. The reference is like that of one device.

    It has the same tensors, as near as rounding allows, and tolerances that are as wide.
    """
    traces = []
    for name, flags in (("several", ("--ttrace-reference-layout", layout)), ("one", ())):
        home = tmp_path / name
        home.mkdir()
        done, summary = check(home, *flags, nproc=8, arguments=(*LLAMA, *more))
        assert done.returncode == 0, done.stdout + done.stderr
        assert list(summary["counts"]) == ["pass"]
        traces.append(TraceReader(home / "out" / "reference"))
    several, one = traces
    assert set(several) == set(one)
    ours, theirs = map(tolerance.of_reference, traces)
    ratios: dict[Kind, list[float]] = {}
    for key in one:
        if key.kind is Kind.INITIAL:
            continue
        tensors = (trace.tensor(trace.entry(key)) for trace in traces)
        allowed = theirs.of(key)
        shape = one.entry(key).shape
        start = (0,) * len(shape)
        box = Box(start, shape, start)
        sums = measure(*tensors, [box])
        assert relative_error(sums, allowed.rms) <= allowed.value, key
        if allowed.value:
            ratios.setdefault(key.kind, []).append(ours.of(key).value / allowed.value)
    medians = {kind: statistics.median(found) for kind, found in ratios.items() if len(found) > 8}
    assert all(0.5 < median < 2 for median in medians.values()), medians
