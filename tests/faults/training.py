# SPDX-License-Identifier: Apache-2.0
"""A rank of a training run: records which functions of ours it calls, or fails in one of them.

What is to be done stands in an environment variable that only this script reads, and that is gone
before the training script starts. The bits of losses and gradient norms go to a file.
"""

from __future__ import annotations

import errno
import json
import os
import runpy
import sys
from collections import Counter
from pathlib import Path
from types import CodeType
from typing import Any

ORDER = "TTRACE_FAULTS_ORDER"
"""Environment variable: what to do, as JSON: ``bits``, ``record`` (a file each), ``raise``."""
SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "pretrain_gpt.py"

# Not under test here: the stand-in for a GPU, what is not part of a rank, and the net that catches
# exceptions itself.
_LEFT_OUT = (
    "cpu/",
    "jobs/processes/",
    "jobs/job.",
    "jobs/commands/shell_script.",
    "jobs/commands/guard.",
    "cli/",
    "evaluation/",
    "trace/errors.",
)
_ENTRY = ("entry.py", "loop.py", "__init__.py", "__main__.py", "resources.py")
_TOOL = 3


def _name(code: CodeType, package: str) -> str | None:
    """``file:function`` of a function that may fail, else ``None``."""
    if not code.co_filename.startswith(package):
        return None
    file = code.co_filename[len(package) :]
    if file.startswith(_LEFT_OUT) or file.endswith(_ENTRY) or "<" in code.co_name:
        return None
    return f"{file}:{code.co_qualname}"


def _error(kind: str) -> BaseException:
    from megatron_ttrace.trace.errors import TTraceError

    if kind == "OSError":
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    kinds: dict[str, type[BaseException]] = {
        "RuntimeError": RuntimeError,
        "MemoryError": MemoryError,
        "KeyError": KeyError,
        "TTraceError": TTraceError,
    }
    return kinds[kind]("put in by a test")


def watch(order: dict[str, Any]) -> None:
    """Count calls, or raise at one of them."""
    import megatron_ttrace

    package = f"{Path(megatron_ttrace.__file__).parent}{os.sep}"
    monitoring = sys.monitoring
    calls: Counter[str] = Counter()
    wanted = order.get("raise")

    def called(code: CodeType, offset: int) -> Any:
        del offset
        name = _name(code, package)
        if name is None or (wanted is not None and name != wanted["function"]):
            return monitoring.DISABLE
        calls[name] += 1
        if wanted is not None and calls[name] == wanted["call"]:
            Path(wanted["mark"]).write_text(name, encoding="utf-8")
            raise _error(wanted["error"])
        return None

    monitoring.use_tool_id(_TOOL, "faults")
    monitoring.register_callback(_TOOL, monitoring.events.PY_START, called)
    monitoring.set_events(_TOOL, monitoring.events.PY_START)
    if "record" in order:
        leave = os._exit

        def end(code: int) -> None:
            Path(order["record"]).write_text(json.dumps(calls), encoding="utf-8")
            leave(code)

        os._exit = end  # type: ignore[assignment]


def tell_bits(file: Path) -> None:
    """Append the numbers of every iteration, as hexadecimal floats."""
    import megatron.training.training as training

    log = training.training_log

    def training_log(losses: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        names = ("total", "rate", "iteration", "scale", "memory", "skipped", "norm")
        given = dict(zip(names, args, strict=False))
        values = [float(value).hex() for value in losses.values()]
        if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            with file.open("a", encoding="utf-8") as bits:
                print(given["iteration"], *values, float(given["norm"]).hex(), file=bits)
        return log(losses, *args, **kwargs)

    training.training_log = training_log


def main() -> None:
    """Prepare this process and train."""
    order = json.loads(os.environ.pop(ORDER, "{}"))
    # Whoever starts a reference run starts what is here.
    sys.argv[0] = str(SCRIPT)
    sys.path.insert(0, str(SCRIPT.parent))
    mine = order.get(os.environ["RANK"], {})
    if "bits" in order:
        import megatron_ttrace

        megatron_ttrace.enable()
        tell_bits(Path(order["bits"]))
    if mine:
        watch(mine)
    runpy.run_path(str(SCRIPT), run_name="__main__")
    if "record" in mine:
        os._exit(0)


if __name__ == "__main__":
    main()
