# SPDX-License-Identifier: Apache-2.0
"""Train as launch/pretrain_gpt.py does, with what a test asks for in the environment.

``TTRACE_TEST_PLANTED`` names a mistake of ``mistakes.py``, or is a fault of ``checkpoints.py``.
``TTRACE_TEST_ORDER``, which is gone before the script starts, so that neither the checker nor a
reference sees it, is a JSON object:

- ``bits``: print all bits of what each step logs and of the weights it leaves.
- ``states``: a directory for checksums of what each rank begins with (``digests.py``).
- ``mutant``: one to introduce; ``lines``: a directory for a record of the lines that run;
  ``end``: one for checksums of what training ends with.
- ``mode``: ``bare`` runs Megatron on the CPU backend, without the rest of this package;
  ``spilling`` keeps no copy of the training state in memory, and prints their size in files.
- a rank's number: how it fails: a function of ours (``function``), in which ``call`` of it (0: in
  each), with which ``error``, and a file that is written then (``mark``).
"""

import builtins
import errno
import gc
import importlib
import itertools
import json
import os
import runpy
import signal
import sys
from pathlib import Path
from types import CodeType
from typing import Any

# A rank starts with this folder as its path, as any script does.
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import megatron_ttrace
from tests import warm
from tests.assay.planted import digests
from tests.assay.planted.mistakes import PLANTED, plant

ORDER = "TTRACE_TEST_ORDER"
SCRIPT = Path(__file__).resolve().parents[3] / "launch" / "pretrain_gpt.py"

_HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks"),
)
_TOOL = 3


def _name(code: CodeType, package: str) -> str:
    """``file:function``, the file below the package or below ``site-packages``."""
    file = code.co_filename.removeprefix(package).rpartition("site-packages/")[2]
    return f"{file}:{code.co_qualname}"


def _fail(kind: str) -> None:
    if kind == "truncated":
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
        for path in {word for word in maps.split() if word.endswith(".safetensors")}:
            os.truncate(path, 4096)
        return
    if kind == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "OSError":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    raise getattr(builtins, kind)("put in by a test")


def fail_in(order: dict[str, Any]) -> None:
    """Fail at a call of a function."""
    package = f"{Path(megatron_ttrace.__file__).parent}{os.sep}"
    monitoring = sys.monitoring
    calls = itertools.count(1)

    def called(code: CodeType, offset: int) -> Any:
        name = _name(code, package)
        if name != order["function"]:
            return monitoring.DISABLE
        if order["call"] in (0, next(calls)):
            Path(order["mark"]).write_text(name, encoding="utf-8")
            print("INJECTED", name, flush=True)
            _fail(order["error"])
        return None

    monitoring.use_tool_id(_TOOL, "faults")
    monitoring.register_callback(_TOOL, monitoring.events.PY_START, called)
    monitoring.set_events(_TOOL, monitoring.events.PY_START)


def bare() -> None:
    """Megatron on CPU tensors; nothing is hooked."""
    from megatron_ttrace import cpu

    cpu.activate()
    import megatron.training.arguments as megatron_arguments

    parse = megatron_arguments.parse_args

    def parse_args(*args: Any, **more: Any) -> Any:
        parsed = parse(*args, **more)
        cpu.adapt_arguments(parsed)
        return parsed

    for module in list(sys.modules.values()):
        if getattr(module, "parse_args", None) is parse:
            module.parse_args = parse_args  # type: ignore[attr-defined]
    megatron_ttrace.enable = lambda: None  # type: ignore[attr-defined]
    warm.save_without_manager()


def spill() -> None:
    """Copies of the training state are written to files."""
    from megatron_ttrace.trace.budget import Budget
    from megatron_ttrace.trace.copies import Copies

    close = Copies.__exit__

    def closed(copies: Any, *error: Any) -> None:
        print("COPIES", copies._end, flush=True)
        close(copies, *error)

    Budget.kept, Copies.__exit__ = 0, closed  # type: ignore[misc,method-assign,assignment]


def print_bits() -> None:
    """After each step, as hexadecimal floats: losses, the norm, and a checksum of the weights.

    And how often the model has run since the step before, by its own count.
    """
    import megatron.training.training as training
    import torch

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    log, setup, chunks = training.training_log, training.setup_model_and_optimizer, []
    counting: list[Any] = []

    def setup_model(*args: Any, **more: Any) -> Any:
        result = setup(*args, **more)
        chunks.extend(result[0])
        model = chunks[0]
        while hasattr(model, "module"):
            model = model.module
        model.calls = 0
        model.register_forward_hook(lambda *_: setattr(model, "calls", model.calls + 1))
        counting.append(model)
        return result

    def training_log(losses: dict[str, Any], *args: Any, **more: Any) -> Any:
        names = ("total", "rate", "iteration", "scale", "memory", "skipped", "norm")
        logged = dict(zip(names, args, strict=False))
        values = [float(value).hex() for value in losses.values()]
        modules = [o for o in gc.get_objects() if isinstance(o, torch.nn.Module)]
        hooks = sum(len(getattr(module, name)) for module in modules for name in _HOOKS)
        if rank == size - 1:
            # A step that an overflow skips has no norm.
            norm = "skipped" if logged["norm"] is None else float(logged["norm"]).hex()
            print("BITS", logged["iteration"], *values, norm, hooks, flush=True)
            watched = originals != (training.setup_model_and_optimizer, training.train_step)
            print("LOOP", "watched" if watched else "untouched", flush=True)
        calls, counting[0].calls = counting[0].calls, 0
        print("BITS", logged["iteration"], "of", rank, _digest(chunks), calls, flush=True)
        return log(losses, *args, **more)

    training.training_log, training.setup_model_and_optimizer = training_log, setup_model
    originals = (setup_model, training.train_step)


def _digest(chunks: list[Any]) -> str:
    """Of all weights."""
    parameters = (parameter for chunk in chunks for parameter in chunk.parameters())
    return digests.of("".join(map(digests.of, parameters)))


def main() -> None:
    """Prepare this process and train."""
    order = json.loads(os.environ.pop(ORDER, "{}"))
    failure = order.get(os.environ["RANK"])
    if order.get("mode") == "bare":
        bare()
    else:
        megatron_ttrace.enable()
    if order.get("mode") == "spilling":
        spill()
    if order.get("bits"):
        print_bits()
    hybrid = "--hybrid-layer-pattern" in sys.argv
    script = SCRIPT.with_name("pretrain_hybrid.py") if hybrid else SCRIPT
    sys.path.insert(0, str(script.parent))
    if failure:
        fail_in(failure)
    if "states" in order:
        digests.at_start(Path(order["states"]))
    end = digests.at_end(Path(order["end"])) if "end" in order else lambda: None
    if "mutant" in order:
        from megatron_ttrace.trace import codec
        from tests.assay.mutants import records, scan

        scan.introduce(codec.decode(records.Mutant, order["mutant"]))
    if "lines" in order:
        from tests.assay.mutants import coverage, truth

        coverage.record(truth.watched(), Path(order["lines"], f"rank-{os.environ['RANK']}.jsonl"))
    if PLANTED in os.environ:
        plant(os.environ[PLANTED])
        # sys.argv stays as it is: a reference runs this file, too.
        importlib.import_module(script.stem).main()
    else:
        sys.argv[0] = str(script)
        runpy.run_path(str(script), run_name="__main__")
    end()


if __name__ == "__main__":
    main()
