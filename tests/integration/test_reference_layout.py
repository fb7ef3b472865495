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
from tests.integration import jobs
from tests.integration.jobs import TINY, our_lines

JOB = (*TINY, "--num-layers", 4)
TP = ("--tensor-model-parallel-size", 4)
LLAMA = (
    *"--transformer-impl transformer_engine --swiglu --normalization RMSNorm".split(),
    *"--group-query-attention --num-query-groups 2 --position-embedding-type rope".split(),
    *"--disable-bias-linear --global-batch-size 8 --use-distributed-optimizer".split(),
    *"--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2".split(),
)

EXPERTS = (
    "--disable-bias-linear --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2".split()
)


def check(home: Path, *flags, arguments=TP, nproc=4, **more) -> jobs.Checked:
    """Check the job."""
    flags = ("--ttrace-dir", "out", *flags)
    return jobs.check(home, *arguments, flags=flags, nproc=nproc, model=JOB, **more)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """A directory with a finished check, and its answer."""
    home = tmp_path_factory.mktemp("layout")
    return home, check(home, "--ttrace-reference-layout", "tp=2").document


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
    meta = json.loads((reference / "meta.json").read_text())
    assert meta["layout"] == {"tp": 2, "pp": 1, "cp": 1, "ep": 1}
    assert not [path for path in reference.iterdir() if path.is_dir()]


@pytest.mark.nightly
def test_a_known_bug(healthy):
    """The reference is used again; the bug of one layout is not in the other."""
    flags = ("--ttrace-reference-layout", "tp=2", "--ttrace-bug", "01")
    checked = check(healthy[0], *flags, code=1)
    assert checked.summary.culprits[0].name == "embedding.word_embeddings"
    log = checked.out / "logs" / "rank-00000.log"
    assert "using the reference made earlier" in log.read_text()


def test_no_layout(tmp_path):
    """One line, before anything starts."""
    checked = check(tmp_path, "--ttrace-reference-layout", "tp=2 dp=2", code=2)
    (line,) = our_lines(checked.done.stderr)
    assert line.endswith("'tp=2 dp=2': a reference can be divided along tp, pp, cp, ep, not dp")


@pytest.mark.nightly
def test_a_known_bug_of_experts(tmp_path):
    """Two ranks with half of the experts each, and their own microbatches, are a reference."""
    flags = ("--ttrace-reference-layout", "ep=2", "--ttrace-bug", "08")
    parallel = ("--expert-model-parallel-size", 4, "--use-distributed-optimizer")
    arguments = (*EXPERTS, *parallel, "--num-layers", 2, "--global-batch-size", 8)
    checked = check(tmp_path, *flags, arguments=arguments, code=1)
    assert {culprit.kind for culprit in checked.summary.culprits} == {Kind.PARAM_DELTA}
    assert all(".experts." in culprit.name for culprit in checked.summary.culprits)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        (
            "larger_on_several_ranks",
            "on a shrunk job this layout is not equivalent to one device",
        ),
        (
            "larger_on_one_rank_of_the_full_size",
            "merging the shards: the reference's ranks 1 differ from other ranks in "
            "decoder.layers.0.mlp ",
        ),
    ],
    ids=["small", "large"],
)
def test_a_reference_that_is_wrong_itself(tmp_path, mistake, says):
    """In every size, or only in the full one, where replicas differ: there is no verdict."""
    checked = check(tmp_path, "--ttrace-reference-layout", "tp=2", code=2, mistake=mistake)
    assert says in checked.said
    assert not (checked.out / "reference").exists()


@pytest.mark.nightly
@pytest.mark.parametrize(("bug", "code"), [((), 0), (("--ttrace-bug", "07"), 1)])
def test_fp8(tmp_path, bug, code):
    """Modules are isolated, and the reference's own replays are, too."""
    fp8 = "--bf16 --fp8-format hybrid --fp8-recipe tensorwise --hidden-size 64 --sequence-parallel"
    arguments = (*TP, "--transformer-impl", "transformer_engine", *fp8.split())
    flags = ("--ttrace-reference-layout", "tp=2", *bug)
    checked = check(tmp_path, *flags, arguments=arguments, code=code)
    culprits = [culprit.name for culprit in checked.summary.culprits]
    assert culprits[:1] == ["decoder.layers.0.self_attention.linear_qkv"][:code]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("layout", "more"),
    [
        ("tp=2 pp=2", ("--bf16",)),
        ("pp=2 cp=2", ("--fp16", "--untie-embeddings-and-output-weights")),
        ("ep=2 pp=2", EXPERTS),
        ("cp=2 ep=4", (*EXPERTS, "--moe-grouped-gemm", "--bf16")),
        ("tp=2 ep=2", (*EXPERTS, "--moe-shared-expert-intermediate-size", 64)),
    ],
)
def test_several_ranks(tmp_path, layout, more):
    """The candidate has other axes. The reference is like that of one device.

    It has the same tensors, as near as rounding allows, and tolerances that are as wide.
    """
    traces = []
    for name, flags in (("several", ("--ttrace-reference-layout", layout)), ("one", ())):
        home = tmp_path / name
        home.mkdir()
        checked = check(home, *flags, nproc=8, arguments=(*LLAMA, *more))
        assert list(checked.document["counts"]) == ["pass"]
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
