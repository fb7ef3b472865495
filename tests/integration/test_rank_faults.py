# SPDX-License-Identifier: Apache-2.0
"""One rank fails at one place: training goes on bit for bit, or the job ends with one line."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import warm
from tests.integration.jobs import ROOT, TINY, TRAIN, environment
from tests.planted.train import ORDER

HERE = Path(__file__).parent

TENSOR = ("--tensor-model-parallel-size", "2")
ZERO = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
FSDP = (
    *("--use-megatron-fsdp", "--ckpt-format", "fsdp_dtensor"),
    *("--data-parallel-sharding-strategy", "optim_grads_params"),
)
EXPERTS = (
    *("--num-experts", "4", "--expert-model-parallel-size", "2", "--moe-router-topk", "2"),
    *("--moe-token-dispatcher-type", "alltoall", "--moe-aux-loss-coeff", "1e-2"),
    "--disable-bias-linear",
)
PIPELINE = ("--pipeline-model-parallel-size", "2")
FP8 = (
    *("--fp8-format", "hybrid", "--bf16", "--transformer-impl", "transformer_engine"),
    *("--fp8-recipe", "delayed", *TENSOR),
)

EXIT = (*TENSOR, "--ttrace-exit")
"""Without ``--ttrace`` this flag does nothing."""

CANDIDATE, REHEARSAL = "run/candidate.py:", "run/rehearsal.py:Rehearsal."
ANSWER, COMPARISON = "run/answer.py:", "run/comparison.py:"
OPTIMIZER = "mcore/optimizer.py:"
SINK, CAPTURE = "compare/sinks.py:CompareSink.", "capture/"
STORE = "trace/store.py:"

SHORT = [
    (ZERO, f"{CANDIDATE}CandidateSession._check@1", "trains"),
    (ZERO, f"{CAPTURE}step.py:StepTap._gradients@1", "trains"),
    (ZERO, "saved/conclusion.py:conclude@1", "trains"),
    (ZERO, f"{OPTIMIZER}Snapshot.restore@1", "ends"),
]

PLACES = {
    f"{CANDIDATE}CandidateSession.__init__": "trains",
    "trace/shared.py:require": "trains",
    f"{STORE}TraceReader.__init__": "trains",
    "compare/tolerance.py:of_reference": "trains",
    f"{CANDIDATE}CandidateSession.begin": "trains",
    f"{COMPARISON}Comparison.initial": "trains",
    f"{CAPTURE}batches.py:Served.__init__": "trains",
    f"{REHEARSAL}_keep": "trains",
    f"{OPTIMIZER}Snapshot.__init__": "trains",
    "trace/copies.py:Copies.copy": "trains",
    f"{REHEARSAL}equal_start": "trains",
    f"{REHEARSAL}_fill": "trains",
    f"{REHEARSAL}serve": "trains",
    f"{CANDIDATE}CandidateSession._check": "trains",
    f"{COMPARISON}microbatch_numbers": "trains",
    f"{CANDIDATE}CandidateSession.traces": "trains",
    "compare/tokens.py:match": "trains",
    f"{SINK}__init__": "trains",
    f"{SINK}placed": "trains",
    f"{SINK}tensor": "trains",
    f"{SINK}repeat": "trains",
    f"{STORE}TraceReader.tensor": "trains",
    f"{CAPTURE}modules.py:ModuleTap._attach": "trains",
    f"{CAPTURE}modules.py:ModuleTap.__exit__": "trains",
    f"{CAPTURE}step.py:StepTap._gradients": "trains",
    f"{CAPTURE}step.py:StepTap._update": "trains",
    f"{CAPTURE}step.py:StepTap._losses": "trains",
    f"{REHEARSAL}_settle": "ends",
    f"{OPTIMIZER}Snapshot.restore": "ends",
    f"{COMPARISON}Comparison.findings": "trains",
    "compare/wire.py:encode": "trains",
    "run/channel.py:gather": "ends",
    "run/channel.py:buffer": "trains",
    "run/channel.py:decode": "trains",
    "megatron/core/models/gpt/gpt_model.py:GPTModel.forward": "ends",
}
"""Functions that run on every rank."""

LONG = [
    *((ZERO, f"{place}@{rank}", end) for place, end in PLACES.items() for rank in (0, 1)),
    # Only the first tensor-parallel rank has batches to match.
    *((TENSOR, f"{p}@{int('match' not in p)}", end) for p, end in PLACES.items()),
    (ZERO, "trace/shared.py:prepare@0", "trains"),
    (ZERO, "run/launch.py:ensure@0", "trains"),
    (ZERO, f"{ANSWER}publish@1", "trains"),
    (ZERO, f"{SINK}tensor@1=70", "trains"),
    (ZERO, f"{CAPTURE}step.py:StepTap._update@0=2", "trains"),
    (ZERO, f"{STORE}TraceReader.tensor@1=3!OSError", "trains"),
    (ZERO, f"{COMPARISON}Comparison.findings@1!OSError", "trains"),
    (ZERO, f"{REHEARSAL}_fill@0!MemoryError", "trains"),
    (ZERO, f"{CANDIDATE}CandidateSession._check@1!SIGKILL", "dies"),
    (ZERO, "trace/shared.py:require@0!SIGKILL", "dies"),
    (EXPERTS, f"{SINK}tensor@1=5", "trains"),
    (EXPERTS, f"{SINK}positions@1", "trains"),
    (EXPERTS, f"{CAPTURE}experts.py:DispatchTap._follow@0", "trains"),
    (EXPERTS, f"{CAPTURE}experts.py:RouterTap.remove@1", "trains"),
    (EXPERTS, f"{CAPTURE}experts.py:RouterTap.remove@0=0", "ends"),
    (EXPERTS, f"{CAPTURE}modules.py:ModuleTap.__exit__@1", "trains"),
    (PIPELINE, f"{SINK}tensor@1=5", "trains"),
    (PIPELINE, f"{CANDIDATE}CandidateSession._check@0", "trains"),
    (PIPELINE, "megatron/core/models/gpt/gpt_model.py:GPTModel.forward@0", "ends"),
    (FSDP, f"{REHEARSAL}_fill@1", "trains"),
    (FSDP, f"{SINK}tensor@0=5", "trains"),
    (FSDP, f"{OPTIMIZER}Snapshot.restore@0", "ends"),
    (FP8, f"{SINK}replace@1=3", "trains"),
    (EXIT, f"{CANDIDATE}CandidateSession._check@1", "exits"),
    (EXIT, f"{SINK}tensor@1=5", "exits"),
    (EXIT, "saved/conclusion.py:conclude@1", "exits"),
    (FP8, "run/low_precision.py:restart_scales@1", "trains"),
]


@dataclasses.dataclass(frozen=True)
class Done:
    """What a job left.

    Attributes:
        codes: exit codes of its ranks.
        seconds: it took.
        logs: of its ranks.
    """

    codes: list[int | None]
    seconds: float
    logs: list[str]

    @property
    def bits(self) -> list[str]:
        """The losses and gradient norms, to the bit."""
        return re.findall(r"BITS .*", "\n".join(self.logs))

    def lines(self, ending: str) -> list[set[str]]:
        """What each rank said of ours that ends so."""
        return [
            set(re.findall(rf"^ttrace(?: ends)?: (.*); {ending}$", log, re.MULTILINE))
            for log in self.logs
        ]


def order_of(fault: str, directory: Path) -> dict[str, object]:
    """What a rank is to do: ``file:function@rank``, and ``=call`` and ``!error`` after that."""
    pattern = r"([^@]+)@(\d)(?:=(\d+))?(?:!(\w+))?"
    parts = re.fullmatch(pattern, fault)
    if parts is None:
        return {}
    function, rank, call, error = parts.groups()
    failure = {"function": function, "call": int(call or 1), "error": error or "RuntimeError"}
    return {rank: {"raise": {**failure, "mark": str(directory / "mark")}}}


def train(folder: Path, wanted: list[tuple[tuple[str, ...], str]]) -> list[Done]:
    """Train each layout with its fault; the fault ``untraced`` is training without the checker."""
    jobs = []
    for number, (layout, fault) in enumerate(wanted):
        directory = folder / str(number)
        traced = ["--ttrace", "--ttrace-no-wandb", "--ttrace-dir", str(directory / "out")]
        words = [] if fault == "untraced" else [*traced, "--ttrace-iterations", "1-2"]
        jobs.append(
            {
                "directory": str(directory),
                "limit": 150,
                "nproc": 2,
                "script": str(TRAIN),
                "arguments": [*TINY, *layout, *words],
                "environment": {
                    ORDER: json.dumps({"bits": True, **order_of(fault, directory)}),
                    "TTRACE_CACHE": str(folder / "cache"),
                },
            }
        )
    folder.mkdir(exist_ok=True)
    order = folder / "jobs.json"
    order.write_text(json.dumps(jobs))
    driver = [HERE / "faults_driver.py", order]
    ran = warm.run(driver, env=environment(), cwd=ROOT, timeout=200 * len(jobs))
    assert ran.returncode == 0, ran.stderr
    return [Done(**json.loads(line)) for line in ran.stdout.splitlines()]


def judge(fault: str, expected: str, done: Done, untraced: Done) -> str:
    """What is wrong with how a faulty job ended; empty when nothing is."""
    rank = int(fault.partition("@")[2][0])
    if "INJECTED" not in done.logs[rank]:
        return "the fault was never reached"
    if expected == "trains":
        said = done.lines("training goes on, UNCHECKED")
        if done.codes != [0, 0] or done.bits != untraced.bits:
            return f"codes {done.codes}, losses {done.bits}, not {untraced.bits}"
        if not said[0] or said[0] != said[rank] or len(said[0]) != 1:
            return f"told {said}"
        return "" if f"rank {rank} on " in str(said) or rank == 0 else f"told {said}"
    if not set(done.bits) <= set(untraced.bits):
        return f"trained on with other numbers: {done.bits}"
    if expected == "exits":
        told = re.search(rf"^ttrace: rank {rank} on .*", done.logs[0], re.MULTILINE)
        return "" if done.codes == [2, 2] and told else f"codes {done.codes}"
    if expected == "dies":
        return "" if not set(done.codes) & {0, 1, "hangs"} else f"codes {done.codes}"
    if None in done.codes or set(done.codes) & {0, 1, "hangs"}:
        return f"codes {done.codes}"
    said = done.lines("the job ends")
    return "" if len(said[rank]) == 1 else f"told {said}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder, so that references are shared."""
    return tmp_path_factory.mktemp("faults")


def check(folder: Path, cases: list[tuple[tuple[str, ...], str, str]]) -> None:
    """Run cases with the untraced run of each of their layouts, and judge all of them."""
    layouts = list(dict.fromkeys(layout for layout, _, _ in cases))
    wanted = [(layout, "untraced") for layout in layouts]
    done = train(folder, [*wanted, *((layout, fault) for layout, fault, _ in cases)])
    plain = dict(zip(layouts, done, strict=False))
    for run in plain.values():
        assert run.codes == [0, 0], run.logs
        assert len(run.bits) == 9
    wrong, table = [], []
    for (layout, fault, expected), run in zip(cases, done[len(layouts) :], strict=True):
        problem = judge(fault, expected, run, plain[layout])
        table.append(
            f"{' '.join(layout)[:40]:40} {fault:80} {expected:6} {run.seconds:5.1f} s {problem}"
        )
        if problem:
            tails = "\n".join(log[-1500:] for log in run.logs)
            wrong.append(f"{' '.join(layout)} {fault}: {problem}\n{tails}")
    print("\n".join(table))
    assert not wrong, "\n\n".join(wrong)


def test_representative_faults(folder: Path) -> None:
    """In the comparison, in a hook, and while the training state is put back."""
    check(folder, SHORT)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(4))
def test_faults_everywhere(folder: Path, part: int) -> None:
    """Every function that all ranks run, on each rank and in several layouts."""
    check(folder / f"{part}", LONG[part::4])


def test_a_judge_that_can_fail() -> None:
    """Silence, other losses, a hang, a fault that was never reached: each is noticed."""
    log = "INJECTED\nBITS 1 a\nttrace: rank 1 on x, y: z; training goes on, UNCHECKED\n"
    good = Done([0, 0], 1.0, [log.replace("INJECTED", ""), log])
    plain = dataclasses.replace(good, logs=["BITS 1 a", "BITS 1 a"])
    changed: Callable[..., Done] = lambda **to: dataclasses.replace(good, **to)  # noqa: E731
    assert judge("f@1", "trains", good, plain) == ""
    assert judge("f@1", "trains", changed(logs=[log, "BITS 1 a"]), plain)
    assert judge("f@1", "trains", changed(logs=[log, log.replace(" a", " b")]), plain)
    assert judge("f@1", "trains", changed(logs=["", log.replace("z;", "z,")]), plain)
    assert judge("f@1", "trains", changed(codes=[0, 2]), plain)
    assert judge("f@1", "ends", good, plain)
    assert judge("f@1", "ends", changed(codes=["hangs"]), plain)
    assert judge("f@1", "dies", changed(codes=[0, -9], logs=["", "INJECTED"]), plain)
    assert judge("f@1", "exits", changed(codes=[2, 0]), plain)
    ends = log.replace("training goes on, UNCHECKED", "the job ends")
    assert judge("f@1", "ends", changed(codes=[2, 2], logs=[ends, ends]), plain) == ""
