# SPDX-License-Identifier: Apache-2.0
"""Run the tests of ``make gpu``, in order of worth; each appends a line of JSON as it ends.

Some run at the same time; those that measure run last, one by one. A failed one leaves its output.

A run that is cut off still tells of the tests that ended. Each test is a process with a time limit.
On a machine without a GPU (``--dry``) every command is built; what is quick on a CPU is run there,
at the smallest size, and the rest is reported as ``dry``.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.gpu.tests_of_make import TESTS, Context, Test, UnavailableError

ROOT = Path(__file__).parents[2]
FILE = "gpu.jsonl"


def machine() -> dict[str, str]:
    """What the tests ran on."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    try:
        engine = importlib.metadata.version("transformer-engine-torch")
    except importlib.metadata.PackageNotFoundError:
        engine = ""
    return {
        "gpu": gpu,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "megatron": importlib.metadata.version("megatron-core"),
        "transformer_engine": engine,
    }


def alone(test: Test, context: Context) -> dict[str, Any]:
    """Run one test in this process; its part of a line."""
    try:
        figures = test.run(context)
        result, note = "dry" if context.skipped else "passed", ""
    except UnavailableError as error:
        result, note, figures = "not available", str(error), {}
    except Exception as error:  # noqa: BLE001 - a line must be written
        traceback.print_exc()  # the line has only the end of what a command wrote
        told = str(error) if isinstance(error, AssertionError) else f"{error!r}"
        result, note, figures = "failed", told[-1500:], {}
    if result == "passed" and context.dry:
        result = "passed on a CPU"
    return {
        "result": result,
        "note": _anywhere(note, context),
        "figures": {**context.figures, **(figures or {})},
        "commands": [_anywhere(" ".join(words), context) for words in context.commands],
    }


def _anywhere(text: str, context: Context) -> str:
    """Without the folders of this machine."""
    return text.replace(f"{ROOT}/", "").replace(str(context.folder), "DIR")


def apart(test: Test, words: list[str], folder: Path) -> dict[str, Any]:
    """Run one test in a process group of its own, which ends with its time limit.

    ``folder`` then has its output, in ``log``.
    """
    answer = folder / "answer.json"
    command = [sys.executable, "-m", "tests.gpu.run", *words, "--alone", test.name]
    log = (folder / "log").open("w+")
    process = subprocess.Popen(
        [*command, "--answer", str(answer)],
        cwd=ROOT,
        start_new_session=True,
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    try:
        process.wait(test.limit)
    except subprocess.TimeoutExpired:
        note = f"took more than {test.limit} s"
        return {"result": "timed out", "note": note, "figures": {}, "commands": []}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # ranks that outlived it, too
        process.wait()
    if answer.exists():
        found: dict[str, Any] = json.loads(answer.read_text())
        return found
    log.seek(0)
    return {"result": "failed", "note": log.read()[-1500:], "figures": {}, "commands": []}


def main() -> int:
    """Exit code 1 if a test failed or took too long."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("gpu-results"))
    parser.add_argument("--dry", action="store_true", help="without a GPU")
    parser.add_argument("--no-training", action="store_true", help="when dry: train nothing")
    parser.add_argument("--only", nargs="*", default=[], help="names or letters of tests")
    parser.add_argument("--at-a-time", type=int, default=max((os.cpu_count() or 1) // 4, 1))
    parser.add_argument("--te", action="store_true", help="the tests of TransformerEngine instead")
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        with tempfile.TemporaryDirectory(prefix="ttrace-gpu-") as home:
            context = Context(Path(home), dry=args.dry, trains=not args.no_training, te=args.te)
            [test] = [one for one in TESTS if one.name == args.alone]
            args.answer.write_text(json.dumps(alone(test, context)))
        return 0
    args.results.mkdir(parents=True, exist_ok=True)
    words = [word for word in sys.argv[1:] if word in ("--dry", "--no-training", "--te")]
    chosen = [
        test
        for test in TESTS
        if args.te in test.stages
        and (not args.only or test.name in args.only or test.point in args.only)
    ]
    assert chosen, f"no such test: {args.only}"
    about, writing = machine(), threading.Lock()

    def run(test: Test) -> bool:
        """Whether it went well."""
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="ttrace-gpu-") as home:
            found = apart(test, words, Path(home))
            is_good = found["result"] not in ("failed", "timed out")
            name = f"te-{test.name}" if args.te else test.name
            if not is_good:
                shutil.copy(Path(home, "log"), args.results / f"{name}.log")
        line = {
            "test": name,
            "point": test.point,
            "what": test.what,
            **found,
            "seconds": round(time.monotonic() - began, 1),
            "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            **about,
        }
        with writing:
            with (args.results / FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())
            note = line["note"][:300]
            print(f"{line['test']:24} {line['result']:16} {line['seconds']:6} s  {note}")
        return is_good

    with ThreadPoolExecutor(args.at_a_time) as pool:  # most of a small job is start-up
        went = list(pool.map(run, [test for test in chosen if not test.measures]))
    went += [run(test) for test in chosen if test.measures]
    return int(not all(went))


if __name__ == "__main__":
    sys.exit(main())
