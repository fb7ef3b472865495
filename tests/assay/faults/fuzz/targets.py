# SPDX-License-Identifier: Apache-2.0
"""A small run whose answer is known, and one way to damage each of its files.

The candidate of two ranks has one wrong tensor: whatever is damaged, the answer must never be
"equivalent".
"""

import argparse
import dataclasses
import json
import os
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import torch

from megatron_ttrace.compare import wire
from megatron_ttrace.compare.gathered import of_rank
from megatron_ttrace.compare.moved import Moved, write_moves
from megatron_ttrace.compare.offline import measure_saved
from megatron_ttrace.compare.planning import RankLayout
from megatron_ttrace.compare.sinks import CompareSink
from megatron_ttrace.compare.writing import WriteSink
from megatron_ttrace.jobs import resources, script_patch, settings
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.placement.placements import Shard
from megatron_ttrace.placement.plan import Step
from megatron_ttrace.trace import codec, files
from megatron_ttrace.trace.captured import Place
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.moments import moments_of
from megatron_ttrace.trace.records import Kind, TraceKey
from megatron_ttrace.trace.sealing import checksum_of, seal_json
from megatron_ttrace.trace.store import Entry, TraceReader, TraceWriter, seal
from tests.assay.faults.fuzz import mutations
from tests.assay.faults.fuzz.harness import Attempt, WrongError, command
from tests.compare.traces import step_level
from tests.placement.meshes import mesh_of

EQUIVALENT = 0
Tensors = Mapping[Place, torch.Tensor]
_OUT = (0, Kind.OUTPUT, "decoder.layers.0", 0)
_WRONG = (0, Kind.OUTPUT, "decoder.layers.1", 0)
_GRAD = (0, Kind.GRAD_OUTPUT, "decoder.layers.0", 0)
_PARTIAL = (0, Kind.GRAD_INPUT, "decoder.layers.0", 0)
_WEIGHT = step_level(Kind.MAIN_GRAD, "w")
_START = step_level(Kind.PARAM, "w")
_TOKENS = (0, Kind.TOKENS, "tokens", 0)
_CONFIG = {
    "layers": 2,
    "seq_length": 16,
    "isolate": False,
    "arithmetic": {"splits_sums": ["tp"], "pp": 1, "dp": 1},
}


def build(home: Path) -> Path:
    """The traces and the report of a check of two tensor-parallel ranks that diverged."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(8, 6, generator=generator)
    known = {
        _TOKENS: torch.arange(32).reshape(2, 16),
        _START: weight,
        _OUT: torch.randn(16, 2, 6, generator=generator),
        _WRONG: torch.randn(16, 2, 6, generator=generator),
        _GRAD: torch.randn(16, 2, 6, generator=generator).bfloat16(),
        _PARTIAL: torch.randn(16, 2, 6, generator=generator),
        _WEIGHT: weight + 1,
    }

    start = _initial(weight)
    _save_reference(home / "reference", known, start)
    _save_candidate(home / "candidate", known, start, TraceReader(home / "reference"))
    traces = [str(home / "reference"), str(home / "candidate")]
    if command(["compare", *traces, "--output", str(home / "report")]) != 1:
        raise AssertionError("the undamaged run has to be told from its reference")
    return home


def _save_reference(folder: Path, known: Tensors, start: Entry) -> None:
    writer = TraceWriter(folder, 0)
    sink = WriteSink(writer, 1)
    for place, data in known.items():
        sink.tensor((place,), data)
    writer.add(start, None)
    writer.close()
    # Four times what the replays moved is the tolerance.
    moves = {
        TraceKey(1, *place): Moved(data.numel(), float(data.double().norm()), (0.003,))
        for place, data in known.items()
        if place != _TOKENS
    }
    write_moves(folder, moves)
    seal(folder, {"role": "reference", "epsilon": 2.0**-7, "microbatches": 1})


def _save_candidate(folder: Path, known: Tensors, start: Entry, reference: TraceReader) -> None:
    meshes = [mesh_of(rank, 2, tp=2) for rank in range(2)]
    for rank, mesh in enumerate(meshes):
        writer = TraceWriter(folder, rank)
        layout = RankLayout(mesh, 16, 2.0, partials={_PARTIAL: "tp"})
        sink = CompareSink(reference, 1, layout, writer=writer, keep_all=True)
        for place, data in known.items():
            part = data if place in (_TOKENS, _PARTIAL) else data.chunk(2)[rank]
            part = part * {_GRAD: 2, _WRONG: 1 + 0.5 * rank}.get(place, 1)
            if place in (_WEIGHT, _START):
                sink.placed(place, part, data.shape, (Step("tp", Shard(0)),))
            else:
                sink.tensor((place,), part)
        writer.add(start, None)
        writer.close()
    encoded = [codec.encode(dataclasses.asdict(mesh)) for mesh in meshes]
    meta = {"role": "candidate", "complete": True, "config": _CONFIG, "meshes": encoded}
    seal(folder, meta)


def _initial(weight: torch.Tensor) -> Entry:
    moments = moments_of(weight)
    sums = tuple(getattr(moments, name) for name in moments.__slots__)
    key = TraceKey(1, *step_level(Kind.INITIAL, "w"))
    box = ((0, 0), (8, 6), (0, 0))
    return Entry(key, (8, 6), "float32", logical_shape=(8, 6), boxes=(Box(*box),), sums=sums)


def _never_equivalent(code: int) -> int:
    if code == EQUIVALENT:
        raise WrongError("a run that diverged is called equivalent")
    return code


def trace_file(home: Path, side: str, name: str, *, resealed: bool) -> Attempt:
    """Damage a file of a trace, and compare.

    Args:
        home: of the run.
        side: ``reference`` or ``candidate``.
        name: of the file; the values of a resealed ``meta.json`` change instead of its bytes.
        resealed: whether ``meta.json`` is of the damaged file: then the parsers behind it are
            reached. Some such damage cannot be told from another run, so a verdict is no error.
    """

    def attempt(dice: random.Random) -> int:
        work = _copy(home)
        path = work / side / name
        try:
            if name == "meta.json" and resealed:
                seal(work / side, mutations.change(_unsealed(path), dice))
            else:
                data = path.read_bytes()
                changed = _header(data, dice) if path.suffix == ".safetensors" else None
                path.write_bytes(mutations.damage(data, dice) if changed is None else changed)
                if path.read_bytes() == data:
                    return 2
                if resealed:
                    seal(work / side, _unsealed(work / side / "meta.json"))
        except (TypeError, ValueError, AttributeError):
            return 2
        traces = [str(work / "reference"), str(work / "candidate")]
        code = command(["compare", *traces, "--output", str(work / "out"), "--json"])
        return code if resealed else _never_equivalent(code)

    return attempt


def report(home: Path, name: str, *, resealed: bool) -> Attempt:
    """Damage a file of a report, and show it; resealed, with the right checksums."""

    def attempt(dice: random.Random) -> int:
        work = _copy(home)
        folder = work / "report"
        document: object = _document(folder)
        if resealed and name == files.SUMMARY:
            document = mutations.change(document, dice)
        else:
            path = folder / name
            path.write_bytes(mutations.damage(path.read_bytes(), dice))
        if not isinstance(document, dict) or not document:
            return 2
        if resealed:
            _reseal_report(folder, document)
        how = dice.choice(([], [], ["--json"], ["--html", str(work / "x.html")]))
        how = [*how, *dice.choice(([], [], ["--junit", str(work / "x.xml")]))]
        return _never_equivalent(command(["report", str(folder), *how]))

    return attempt


def messages(home: Path) -> Attempt:
    """Damage what a rank tells the others."""
    reference, candidate = TraceReader(home / "reference"), TraceReader(home / "candidate")
    measured = of_rank(0, measure_saved(reference, candidate)[0])
    sent = json.dumps(wire.encode(measured)).encode() + b"\n"

    def attempt(dice: random.Random) -> int:
        try:
            wire.decode(codec.parse(mutations.damage(sent, dice)))
        except codec.CodecError:
            return 2
        return 0

    return attempt


def patch(home: Path) -> Attempt:
    """Damage a patch, the script that it is for, or what says which release that is."""
    folder = resources.patches_dir() / "megatron-lm"
    diff = max(folder.glob("*.patch")).read_text(encoding="utf-8")
    change = script_patch.parse(diff)
    script = "\n".join(change.before) + "\n"

    def attempt(dice: random.Random) -> int:
        if dice.random() < 0.5:
            text = mutations.damage(diff.encode(), dice).decode("utf-8", "replace")
            try:
                script_patch.parse(text)
            except ValueError:
                return 2
            return 0
        work = home / f"checkout-{os.getpid()}"
        shutil.rmtree(work, ignore_errors=True)
        info = work / "megatron/core/package_info.py"
        info.parent.mkdir(parents=True)
        info.write_bytes(_maybe(b"MAJOR = 0\nMINOR = 18\nPATCH = 0\n", dice))
        (work / change.path).write_bytes(_maybe(script.encode(), dice))
        return command(["patch", str(work), *dice.choice(([], ["--check"], ["--reverse"]))])

    return attempt


def data(home: Path) -> Attempt:
    """Files of all sorts as data."""

    def attempt(dice: random.Random) -> int:
        work = home / f"data-{os.getpid()}"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        sources = [_source(work, number, dice) for number in range(dice.randrange(1, 4))]
        output = dice.choice((work / "out", work / "a" / "b", sources[0] / "x", Path("/proc/x")))
        how = dice.choice(([], ["--append-eod"], ["--max-bytes", dice.choice(NUMBERS)]))
        glob = dice.choice(
            ([], ["--glob", dice.choice(("*", "", "[", "**", "../*", "/x", "\x00"))])
        )
        sources += [Path(dice.choice(PATHS))] * (dice.random() < 0.2)
        words = [f"./{path}" if str(path).startswith("-") else str(path) for path in sources]
        return command(["data", *words, "--output", str(output), *how, *glob])

    return attempt


NUMBERS = (
    *("0", "-1", "nan", "inf", "-inf", "1e400", "9" * 5000, "99999999999", "1.5", "", " ", "٣"),
    *("0x10", "1_000", "\x00", "--", "1e-400", str(1 << 63), str(-(1 << 64))),
)
PATHS = (
    *("", ".", "/proc/self", "/proc/kmsg", "/dev/null/x", "/proc/self/mem", "\x00", "a\x00b"),
    *("x" * 5000, "\x1b[2J", "~", "/dev/stdin/x", "\udc80", "a\nb", "../" * 2000, "/nonexistent"),
)
_FLAGS = {
    "--ttrace-seeds": NUMBERS,
    "--ttrace-iterations": (*NUMBERS, "1-" + "9" * 5000, "2-1", "1,,2", "1-99999999", "-", ","),
    "--ttrace-timeout": NUMBERS,
    "--ttrace-allow-unchecked": NUMBERS,
    "--ttrace-reference": PATHS,
    "--ttrace-dir": PATHS,
    "--ttrace-device": ("gpu", "\x1b[2J"),
    "--ttrace-init": ("none", ""),
    "--ttrace-role": ("x",),
    "--ttrace-bug": ("\x1b[2J", "", "99"),
}


def flags(home: Path) -> Attempt:
    """Values that no flag takes, and paths that no file has."""

    def attempt(dice: random.Random) -> int:
        path, flag = dice.choice(PATHS), dice.choice(sorted(_FLAGS))
        value = dice.choice(_FLAGS[flag])
        sides = [str(home / "reference"), str(home / "candidate")]
        match dice.randrange(4):
            case 0:
                return command(["report", path, dice.choice(("--html", "--junit")), path])
            case 1:
                return command(["compare", sides[0], path])
            case 2:
                where = ["compare", *sides, "--output", path, "--json"]
                return _never_equivalent(command(where))
        try:
            parsed = settings.add_arguments(_Quiet()).parse_args([f"{flag}={value}"])
            settings.settings_of(parsed).require_valid()
        except (TTraceError, SystemExit, argparse.ArgumentError):
            return 2
        return 0

    return attempt


class _Quiet(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SystemExit(2)


def targets(home: Path) -> dict[str, list[Attempt]]:
    """Every parser, by name; inputs are shared out among its attempts."""
    both, sides = (False, True), ("reference", "candidate")
    files_of_traces = {
        "tolerances": ("tolerances.jsonl", sides[:1]),
        "index": ("rank-00000.index.jsonl", sides),
        "meta": ("meta.json", sides),
        "header": ("rank-00000.0000.safetensors", sides),
    }
    attempts = {
        parser: [
            trace_file(home, side, name, resealed=resealed) for side in where for resealed in both
        ]
        for parser, (name, where) in files_of_traces.items()
    }
    return {
        **attempts,
        "verdicts": [report(home, files.VERDICTS, resealed=resealed) for resealed in both],
        "summary": [report(home, files.SUMMARY, resealed=resealed) for resealed in both],
        "wire": [messages(home)],
        "patch": [patch(home)],
        "data": [data(home)],
        "flags": [flags(home)],
    }


def _copy(home: Path) -> Path:
    """A copy of the run for one input; links to the files that are not damaged would be shared."""
    work = home / f"work-{os.getpid()}"
    shutil.rmtree(work, ignore_errors=True)
    for name in ("reference", "candidate", "report"):
        (work / name).mkdir(parents=True)
        for path in (home / name).iterdir():
            if path.suffix != ".html":
                shutil.copyfile(path, work / name / path.name)
    return work


def _unsealed(path: Path) -> dict[str, object]:
    meta: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
    return {name: meta[name] for name in meta if name not in ("files", "format", "checksum")}


def _document(directory: Path) -> dict[str, object]:
    return json.loads((directory / files.SUMMARY).read_text(encoding="utf-8"))


def _reseal_report(directory: Path, document: dict[str, object]) -> None:
    """Write the summary with the checksums of what is there."""
    if isinstance(sealed := document.get("files"), dict) and files.VERDICTS in sealed:
        content = (directory / files.VERDICTS).read_bytes()
        document = {**document, "files": {**sealed, files.VERDICTS: checksum_of(content)}}
    (directory / files.SUMMARY).write_text(seal_json(document, indent=2), encoding="utf-8")


def _header(content: bytes, dice: random.Random) -> bytes | None:
    """Damage the JSON at the beginning of a safetensors file; its length is written before it."""
    if dice.random() < 0.3:
        return None
    size = int.from_bytes(content[:8], "little")
    head = mutations.damage(content[8 : 8 + size], dice)
    wrong = dice.choice((0, 1 << 40, (1 << 64) - 1, 1))
    length = wrong if dice.random() < 0.1 else len(head)
    return length.to_bytes(8, "little") + head + content[8 + size :]


def _maybe(content: bytes, dice: random.Random) -> bytes:
    return mutations.damage(content, dice) if dice.random() < 0.7 else content


def _source(work: Path, number: int, dice: random.Random) -> Path:
    path = work / f"{number}-{dice.choice(('a', '\x1b[2J', 'ü', '\udc80', '-x'))}"
    match dice.randrange(7):
        case 0:
            path.mkdir()
        case 1:
            path.mkdir()
            (path / "loop").symlink_to(path)
            os.mkfifo(path / "pipe")
            (path / "b.txt").write_bytes(b"text")
        case 2:
            os.mkfifo(path)
        case 3:
            path.symlink_to(work / "nowhere")
        case 4:
            path.write_bytes(b"")
        case 5:
            with path.open("wb") as file:
                file.truncate(dice.choice((1 << 16, 1 << 40)))
        case _:
            path.write_bytes(dice.randbytes(dice.randrange(1, 5000)))
    return path
