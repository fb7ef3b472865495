# SPDX-License-Identifier: Apache-2.0
"""The tests that ``make gpu`` runs, in order of worth; docs/gpu.md explains their points."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.gpu import figures, streams

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "gpu" / "pretrain.py"
TINY = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8 --train-iters 3 "
    "--lr 1e-3 --lr-warmup-iters 0 --mock-data --tokenizer-type NullTokenizer --vocab-size 60 "
    "--make-vocab-size-divisible-by 16 --eval-iters 0 --attention-dropout 0 --hidden-dropout 0 "
    "--log-interval 1 --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
    "--no-persist-layer-norm"
).split()
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "WANDB_MODE": "offline",
    # Megatron demands it with tensor parallelism before Blackwell.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}
ATTENTION = os.environ.get("TE_ATTENTION", "auto")
"""``unfused`` where cuDNN is older than what TransformerEngine was built with."""
EAGER = {"TORCHDYNAMO_DISABLE": "1"}
"""Compiling takes longer than a small job; one test, and those of speed, do compile."""
EXACT = ["--deterministic-mode"]
OVERLAP = [
    "--use-distributed-optimizer",
    "--overlap-grad-reduce",
    "--overlap-param-gather",
]
LAYOUTS = {
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "tp2-sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "dp2-zero-overlap": (2, " ".join(OVERLAP)),
    "ep2": (
        2,
        "--expert-model-parallel-size 2 --num-experts 4 --moe-router-topk 2 "
        "--moe-token-dispatcher-type alltoall --disable-bias-linear --moe-ffn-hidden-size 96",
    ),
    "cp2": (2, "--context-parallel-size 2"),
}
BUGS = {  # id: ranks, layout (the first of patches/bugs)
    "01": (2, "--tensor-model-parallel-size 2"),
    "05": (4, "--pipeline-model-parallel-size 2 --use-distributed-optimizer"),
    "11": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
}


class UnavailableError(Exception):
    """What the test needs is not there, and what that is."""


@dataclasses.dataclass
class Context:
    """Where a test runs: its folder, and what the machine can do."""

    folder: Path
    dry: bool
    trains: bool = True
    te: bool = False
    commands: list[list[str]] = dataclasses.field(default_factory=list)
    figures: dict[str, Any] = dataclasses.field(default_factory=dict)
    quick: bool = True
    skipped: bool = False
    """Whether any command was only built."""

    @property
    def layers(self) -> list[str]:
        """Whose layers the models are made of."""
        if not self.te:
            return ["--transformer-impl", "local"]
        return ["--transformer-impl", "transformer_engine", "--attention-backend", ATTENTION]

    def call(
        self, *words: object, fails: bool = False, **more: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command, which must succeed unless ``fails``; when dry, only what is quick."""
        command = [str(word) for word in words]
        told = [f"{name}={value}" for name, value in more.items()]
        self.commands.append([*told, *command])
        if self.dry and not (self.quick and self.trains):
            self.skipped = True
            return subprocess.CompletedProcess(command, 0, "", "")
        done = subprocess.run(
            command,
            cwd=self.folder,
            env={**os.environ, **ENVIRONMENT, **more},
            capture_output=True,
            text=True,
            check=False,
        )
        assert fails or done.returncode == 0, done.stdout + done.stderr
        return done

    def check(
        self, name: str, nproc: int, *words: str, flags: tuple[str, ...] = (), **more: str
    ) -> tuple[int, dict[str, Any]]:
        """``ttrace check`` of the small model: exit code and summary, which is empty if skipped."""
        more = {**({"TTRACE_TEST_TRANSPORT": "host"} if nproc > 1 else {}), **EAGER, **more}
        home = self.folder / name
        done = self.call(
            *(sys.executable, "-m", "megatron_ttrace", "check", "--nproc-per-node", nproc),
            *("--ttrace-dir", home, "--ttrace-no-wandb", *flags, "--", SCRIPT),
            *(*TINY, *self.layers, *words),
            fails=True,
            **more,
        )
        if self.skipped:
            return 0, {}
        if not (home / "summary.json").exists():
            raise AssertionError(f"exit code {done.returncode}: {done.stdout}{done.stderr}")
        summary = json.loads((home / "summary.json").read_text())
        kept = {key: summary.get(key) for key in ("verdict", "counts", "timings")}
        self.figures[name] = {**kept, "culprits": summary.get("culprits", [])[:2]}
        return done.returncode, summary

    def equivalent(self, name: str, nproc: int, *words: str, **more: Any) -> dict[str, Any]:
        """A check that must find the job equivalent."""
        code, summary = self.check(name, nproc, *words, **more)
        assert code == 0, f"{name}: {summary['verdict']}: {summary.get('culprits', [])[:2]}"
        return summary


@dataclasses.dataclass(frozen=True)
class Test:
    """One test: its name, the point that it belongs to, and its limit in seconds."""

    name: str
    point: str
    what: str
    limit: int
    run: Callable[[Context], dict[str, Any] | None]
    stages: tuple[bool, ...] = (False,)
    measures: bool = False


def doctor(on: Context) -> None:
    """What is installed."""
    on.trains = True
    done = on.call(sys.executable, "-m", "megatron_ttrace", "doctor", "--json")
    on.figures["findings"] = json.loads(done.stdout)


def one_rank(*words: str, eager: bool = True) -> Callable[[Context], None]:
    """One rank over NCCL; bitwise equal where the reference promises it."""

    def run(on: Context) -> None:
        on.equivalent("one-rank", 1, *words, TORCHDYNAMO_DISABLE=str(int(eager)))

    return run


def _need_engine(on: Context, words: str) -> None:
    """Local layers have no context parallelism, and without Apex no sequence parallelism.

    TransformerEngine has context parallelism only in fused attention.

    Raises:
        UnavailableError: for a job of such layers.
    """
    for option in ("--context-parallel-size", "--sequence-parallel"):
        if option in words and not on.te:
            raise UnavailableError(f"local layers without Apex have no {option}")
    if "--context-parallel-size" in words and ATTENTION == "unfused":
        raise UnavailableError("no kernel for attention with context parallelism")


def layout(name: str) -> Callable[[Context], None]:
    """Several ranks of one GPU."""

    def run(on: Context) -> None:
        nproc, words = LAYOUTS[name]
        _need_engine(on, words)
        on.equivalent(name, nproc, *words.split())

    return run


def bug(id: str) -> Callable[[Context], None]:
    """A known bug is found at the module where it is found on a CPU."""

    def run(on: Context) -> None:
        nproc, words = BUGS[id]
        _need_engine(on, words)
        [path] = (ROOT / "patches" / "bugs").glob(f"{id}-*.toml")
        expected = tomllib.loads(path.read_text())["expected"]
        code, summary = on.check(f"bug-{id}", nproc, *words.split(), flags=("--ttrace-bug", id))
        if on.skipped:
            return
        assert code == 1, f"{summary['verdict']}, not diverged"
        named = [(one["name"], one["kind"]) for one in summary["culprits"]]
        wanted = (expected["module"], expected["kind"])
        assert any(name.endswith(wanted[0]) and kind == wanted[1] for name, kind in named), (
            f"{wanted} is not among {named}"
        )

    return run


def bitwise(on: Context) -> None:
    """Training has the same bits with and without ``--ttrace``."""
    found = {}
    for name, flags in {"plain": [], "traced": ["--ttrace", "--ttrace-no-wandb"]}.items():
        done = on.call(
            *(sys.executable, SCRIPT, *TINY, *on.layers, *EXACT, *flags),
            TTRACE_TEST_BITS="1",
            **EAGER,
            **figures.one_process(),
        )
        found[name] = re.findall(r"BITS.*", done.stdout)
    assert on.skipped or len(found["plain"]) >= 3
    assert found["plain"] == found["traced"]


def cpu_against_gpu(on: Context) -> None:
    """Each device's reference against the other's candidate, in fp32."""
    saved = ("--ttrace-save-candidate",)
    for device in ("cpu", "auto"):
        on.equivalent(device, 1, flags=(*saved, "--ttrace-device", device))
    for reference, candidate in (("cpu", "auto"), ("auto", "cpu")):
        on.call(
            *(sys.executable, "-m", "megatron_ttrace", "compare", "--json"),
            *("--output", on.folder / f"{reference}-{candidate}"),
            *(on.folder / reference / "reference", on.folder / candidate / "candidate"),
        )


def blocking(on: Context) -> None:
    """The same verdicts, to the bit, whether or not the host waits for every kernel."""
    lines = {}
    for name in ("1", "0"):
        on.equivalent(f"blocking-{name}", 1, *OVERLAP, *EXACT, CUDA_LAUNCH_BLOCKING=name)
        if not on.skipped:
            text = (on.folder / f"blocking-{name}" / "verdicts.jsonl").read_text()
            lines[name] = [json.loads(line) | {"run": ""} for line in text.splitlines()]
    if on.skipped:
        return
    for blocked, free in zip(lines["1"], lines["0"], strict=True):
        assert blocked == free, f"blocked: {blocked}; free: {free}"


def sanitizer(on: Context) -> None:
    """No kernel reads memory that was not written."""
    on.quick = False
    tool = shutil.which("compute-sanitizer")
    if tool is None and not on.dry:
        raise UnavailableError("compute-sanitizer is not on the path")
    for check in ("memcheck", "initcheck", "racecheck"):
        on.call(
            *(tool or "compute-sanitizer", "--tool", check, "--error-exitcode", "9"),
            *(sys.executable, "-m", "tests.gpu.figures", "agreement"),
        )


def agreement(on: Context) -> dict[str, Any]:
    """The kernel gives the CPU's numbers, for every dtype."""
    return figures.agreement("cpu" if on.dry else "cuda")


def kernel_speed(on: Context) -> dict[str, Any]:
    """The kernel's time against that of reading its bytes."""
    return figures.kernel_speed("cpu" if on.dry else "cuda")


def side_streams(on: Context) -> dict[str, Any]:
    """Modules on streams of their own are captured after they wrote."""
    return streams.side_streams("cpu" if on.dry else "cuda")


def step_speed(size: str) -> Callable[[Context], dict[str, Any]]:
    """Traced steps against plain ones, in bf16."""

    def run(on: Context) -> dict[str, Any]:
        on.quick = False
        told = {}
        for name, flags in {"plain": [], "traced": ["--ttrace", "--ttrace-no-wandb"]}.items():
            done = on.call(
                *(sys.executable, SCRIPT, *figures.MODELS[size], *on.layers, "--bf16", *flags),
                *(["--ttrace-dir", on.folder / "traced"] if flags else []),
                TTRACE_TEST_MEMORY="1",
                **figures.one_process(),
            )
            told[name] = figures.of_log(done.stdout)
        if on.skipped:
            return {}
        summary = json.loads((on.folder / "traced" / "summary.json").read_text())
        return {**told, "timings": summary.get("timings"), "verdict": summary["verdict"]}

    return run


def emulation(on: Context) -> dict[str, Any]:
    """Each emulated module against TransformerEngine's: error in machine epsilons."""
    for name, device in {"emulated": "cpu", "real": "cpu" if on.dry else "cuda"}.items():
        words = sys.executable, "-m", "tests.gpu.te_modules", device, on.folder / name
        on.call(*words, NVIDIA_TF32_OVERRIDE="0")
    if on.skipped:
        return {}
    from tests.gpu import te_modules

    return {"table": te_modules.compare(on.folder / "emulated", on.folder / "real")}


BOTH = (False, True)
TESTS = [
    Test("doctor", "-", "what is installed", 60, doctor, BOTH),
    Test("kernel", "g", "fused kernel against the CPU's numbers", 150, agreement),
    Test(
        "one-rank-fp32", "a", "one rank over NCCL, fp32, deterministic", 150, one_rank(*EXACT), BOTH
    ),
    Test(
        "one-rank-bf16", "a", "one rank over NCCL, bf16", 200, one_rank("--bf16", eager=False), BOTH
    ),
    Test("bitwise", "a", "training with and without --ttrace", 150, bitwise, BOTH),
    *(
        Test(name, "b", f"layout {name}", 180, layout(name), BOTH)
        for name in ("tp2-sp", "dp2-zero-overlap", "tp2", "pp2", "ep2", "cp2")
    ),
    *(Test(f"bug-{id}", "c", f"known bug {id}", 240, bug(id), BOTH) for id in BUGS),
    Test(
        "cpu-against-gpu", "d", "references of one, candidates of the other", 240, cpu_against_gpu
    ),
    Test("kernel-speed", "g", "fused kernel, GB/s", 90, kernel_speed, measures=True),
    Test("side-streams", "e", "modules on streams of their own", 90, side_streams),
    Test("blocking", "e", "CUDA_LAUNCH_BLOCKING beside the asynchronous run", 300, blocking),
    Test("sanitizer", "e", "compute-sanitizer on the kernel", 240, sanitizer),
    *(
        Test(
            f"speed-{size}",
            "f",
            f"traced step against plain, {size[:-1]} B parameters",
            limit,
            step_speed(size),
            measures=True,
        )
        for size, limit in (("0.3B", 300), ("1B", 400))
    ),
    *(
        Test(f"fp8-{recipe}", "a", f"FP8, {recipe} scaling", 200, one_rank(*words), (True,))
        for recipe in ("delayed", "tensorwise")
        for words in [("--bf16", "--fp8-format", "hybrid", "--fp8-recipe", recipe)]
    ),
    Test("emulation", "te", "emulated modules against the real ones", 200, emulation, (True,)),
]
