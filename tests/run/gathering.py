# SPDX-License-Identifier: Apache-2.0
"""Collecting the findings of many ranks: as many processes on one host, with Megatron's layout.

    python -m tests.run.gathering --ranks 256

Each process has what a rank of Kimi K2's first stage holds (tests/placement/scale.py) and sums of
differences that all pass, or with ``--failing`` all fail in one layer; and the counts and the
collectives of such a rank (tests/run/rank_records.py). Nothing is trained. Prints one JSON object:
seconds from the first to the last rank, messages and records of the last rank. "Recorded" are
counts and collectives; what they say is right is asserted.

    python -m tests.run.gathering --stage 16384

does in one process what the ranks of the first stage of a larger job do, and adds up the processor
time on the longest path to the last of them.
"""

import argparse
import dataclasses
import gc
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megatron_ttrace.compare import collectives
from megatron_ttrace.compare import counted as compare_counted
from megatron_ttrace.compare.gathered import number
from megatron_ttrace.compare.measure import Sums
from megatron_ttrace.compare.measured import Measured
from megatron_ttrace.compare.tolerance import Tolerance
from megatron_ttrace.compare.wire import decode
from megatron_ttrace.run import answer, channel, recording
from megatron_ttrace.run.agreement import Ranks
from megatron_ttrace.trace import counted, folded
from megatron_ttrace.trace.records import Outcome
from tests.placement.scale import JOBS, planners
from tests.placement.trillion import Job
from tests.run import rank_records

FAILING = "layers.1.mlp"
LIMITS = SimpleNamespace(of=lambda key: Tolerance(1e-3, 1.0), is_repeated=lambda key: True)
"""The same tolerance for every tensor, which a repeated step does not move, as on a CPU."""


def measured(job: Job, rank: int, *, failing: bool) -> list[Measured]:
    """What a rank of the first stage holds, with sums; replicas have the same."""
    measurements = []
    for planned in planners(job, rank).values():
        for tensor in planned():
            n = sum(box.numel for box in tensor.boxes)
            # Numbers of a tensor's own, as long in JSON as real ones.
            seed = number(tensor.key) ^ (hash(tensor.region) & 0xFFFFFFFF)
            error = 0.5 if failing and FAILING in tensor.key.name else 1e-6 * (seed % 997) / 997
            sums = Sums(
                n=n,
                diff=error**2 * n,
                reference=n / 3,
                candidate=n / 3,
                dot=n / 3,
                worst=error,
                nonfinite=0,
                checksum=seed,
            )
            measurements.append(dataclasses.replace(tensor, sums=sums))
    return measurements


def compared(job: Job, rank: int, *, failing: bool = False) -> Any:
    """What stands for a rank's comparison."""
    measurements, counts = measured(job, rank, failing=failing), [rank_records.counted(job, rank)]
    return SimpleNamespace(findings=lambda: measurements, tolerances=LIMITS, counted=counts)


def of_stage(job: Job) -> dict[str, Any]:
    """What the findings of a job's first stage cost on their way, without the network."""
    size = job.world // job.pp
    args: Any = SimpleNamespace(optimizer="adam")

    def arrived(rank: int) -> tuple[bytes, float, int]:
        """What a rank sends on, processor seconds until then, and bytes that it received."""
        comparison = compared(job, rank)
        recorded = rank_records.ledger(job, rank).to_json()
        began = time.process_time()
        findings = answer.findings_of(rank, job.mesh(rank), comparison, recorded)
        path, received = time.process_time() - began, 0
        for group in channel.tree(rank, size)[0]:
            below = [arrived(child) for child in group]
            received += sum(len(message) for message, *_ in below)
            began = time.process_time()
            parts = [channel.unpacked(message, rank) for message, *_ in below]
            findings = answer.merged([findings, *parts], (), comparison, args)
            path = max(path, *(spent for _, spent, _ in below)) + time.process_time() - began
        began = time.process_time()
        message = channel.packed(findings)
        return message, path + time.process_time() - began, received

    message, path, received = arrived(size - 1)
    began = time.process_time()
    require_right(channel.unpacked(message, 0)["each"], is_whole=False)
    return {
        "ranks": job.world,
        "of the first stage": size,
        "processor seconds on the longest path": round(path, 2),
        "to read and judge counts": round(time.process_time() - began, 2),
        "bytes received by the last rank": received,
    }


def run(job: Job, rank: int, directory: Path, *, failing: bool) -> None:
    """What one process does."""
    store = dist.FileStore(str(directory / "store"), job.world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.world)
    agreed = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    ranks = Ranks(600, store=agreed, rank=rank, size=job.world)
    comparison = compared(job, rank, failing=failing)
    recorded = rank_records.ledger(job, rank).to_json()
    args: Any = SimpleNamespace(optimizer="adam")
    ranks.meet("planning")
    began = time.monotonic()
    sent: list[int] = []
    unpacked = channel.unpacked

    def noted(message: bytes, source: int) -> Any:
        sent.append(len(message))
        return unpacked(message, source)

    channel.unpacked = noted
    failed = frozenset(answer.failing(comparison, ranks))
    sent.clear()
    merged = ranks.collect(
        "collecting the measurements",
        lambda: answer.findings_of(rank, job.mesh(rank), comparison, recorded),
        lambda parts: answer.merged(parts, failed, comparison, args),
    )
    spent = time.monotonic() - began
    if merged is not None:
        tensors = decode(merged["held"])
        result = {
            "ranks": job.world,
            "failing tensors": len(failed),
            "records of all ranks": sum(len(tensor.ranks) for tensor in tensors),
            "records merged": len(tensors),
            "bytes received by the last rank": sum(sent),
            "seconds": round(spent, 2),
            "bytes recorded by a rank": len(
                json.dumps([counted.encode(comparison.counted), recorded])
            ),
            "bytes recorded by all ranks": len(json.dumps(merged["each"])),
        }
        require_right(merged["each"], is_whole=True)
        (directory / "result.json").write_text(json.dumps(result))
    ranks.meet("leaving")


def require_right(records: dict[str, Any], *, is_whole: bool) -> None:
    """Read and judge what ranks recorded; collectives only of a whole job, which has both ends."""
    once, unfolded = folded.Once(), folded.unfold(records)
    counts = {
        rank: [counted.expanded(step, once) for step in steps]
        for rank, (_, steps, _) in unfolded.items()
    }
    verdicts = compare_counted.judge((), counts).verdicts
    assert {verdict.verdict for verdict in verdicts} == {Outcome.PASS}
    if not is_whole:
        return
    ledgers = [recording.decoded(message, once) for *_, message in unfolded.values()]
    ledger = collectives.merge(ledgers, lambda _: "", compute="bfloat16", gradients="bfloat16")
    assert ledger.collectives
    assert not ledger.findings


def _serve() -> int:
    """Start the job's key-value store in a process of its own, since it has threads."""
    reader, writer = os.pipe()
    if child := os.fork():
        os.environ["MASTER_PORT"] = os.read(reader, 8).decode()
        return child
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(writer, str(server.port).encode())
    signal.pause()
    os._exit(0)


def main() -> None:
    """Fork the ranks, and print what the last one found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--failing", action="store_true")
    parser.add_argument("--stage", type=int, choices=[job.world for job in JOBS])
    args = parser.parse_args()
    if args.stage:
        print(json.dumps(of_stage(next(job for job in JOBS if job.world == args.stage))))
        return
    job = Job(tp=8, cp=4, pp=1, dp=args.ranks // 32, ep=min(64, args.ranks))
    torch.set_num_threads(1)
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    server = _serve()
    # What is computed and collected here is shared by all ranks' memory.
    compared(job, 0), rank_records.ledger(job, 0)
    gc.collect()
    gc.freeze()
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(job.world):
            if not (child := os.fork()):
                try:
                    run(job, rank, Path(folder), failing=args.failing)
                except BaseException:  # noqa: BLE001 - a forked child must not run its parent's code
                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            children.append(child)
        gc.unfreeze()
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        os.kill(server, signal.SIGKILL)
        if any(codes):
            sys.exit(f"{sum(map(bool, codes))} of {job.world} ranks failed")
        print((Path(folder) / "result.json").read_text())


if __name__ == "__main__":
    main()
