# SPDX-License-Identifier: Apache-2.0
"""Start ranks by forking a process that has already imported torch and Megatron.

Imports take most of the time of a small check. Here one parent imports, and every rank and every
reference run is a fork of it. A rank requests its reference run over a socket that it inherits.

CUDA does not survive a fork, but a process that has only imported what uses it can fork others that
do. So this one asks nothing of the GPU's driver, and if an import did, ranks are new processes.
"""

import argparse
import contextlib
import ctypes
import functools
import gc
import importlib
import importlib.util
import inspect
import io
import json
import os
import select
import signal
import socket
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron_ttrace.jobs import script as scripts
from megatron_ttrace.jobs.processes import ahead, signals, tether
from megatron_ttrace.jobs.processes.generated import methods
from megatron_ttrace.mcore.versions import quiet_imports
from megatron_ttrace.trace import ends, owned
from megatron_ttrace.trace.errors import TTraceError, reported

_VARIABLE = "TTRACE_FORKSERVER"
_MARGIN_SECONDS = 10.0
_HAS_GPU = 1
"""Exit code of a child that was asked."""
_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
_NOT_INITIALIZED = 3
_MODULES = (
    "megatron.training.training",
    "megatron.core.models.gpt",
    # Megatron imports these while a job starts.
    "megatron.core.datasets.blended_megatron_dataset_builder",
    "megatron.core.models.mimo",
    "megatron.core.tokenizers.text",
)
_OURS = (
    "megatron_ttrace.run.candidate",
    "megatron_ttrace.run.entry",
    "megatron_ttrace.run.loop",
    "megatron_ttrace.run.reference_run",
)
"""What a rank imports for a check; this room imports none of it itself."""
_DEFERRED = "wandb"
"""What Megatron's timers import, to compare a writer with it."""


def needs_cpu(device: str) -> bool:
    """``cpu.needed``, without asking the GPU's driver in this process."""
    with light_imports():
        if "torch" not in sys.modules:
            ahead.load_torch()
        import torch

        from megatron_ttrace import cpu

    if device != "auto" or cpu.active():
        return cpu.needed(device)
    if not torch.backends.cuda.is_built():
        return True
    child = os.fork()
    if not child:
        try:
            os._exit(0 if cpu.needed(device) else _HAS_GPU)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != _HAS_GPU


def imports_use_gpu() -> bool:
    """Whether importing TransformerEngine asks for the GPU's capability: beside FlashAttention."""
    names = ("transformer_engine", "flash_attn")
    return all(importlib.util.find_spec(name) is not None for name in names)


def is_gpu_unused() -> bool:
    """Whether this process has asked nothing of the GPU's driver, so that its forks can use it."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True
    # https://docs.nvidia.com/cuda/cuda-driver-api/: CUDA_ERROR_NOT_INITIALIZED before cuInit
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == _NOT_INITIALIZED)


@contextlib.contextmanager
def _asking_nvml() -> Iterator[None]:
    """For imports: ``torch.cuda.is_available`` then asks NVML, which leaves the driver alone."""
    before = os.environ.get(_NVML)
    os.environ[_NVML] = "1"
    try:
        yield
    finally:
        del os.environ[_NVML]
        if before is not None:
            os.environ[_NVML] = before


def preload(script: Path, *, arguments: Sequence[str] = (), on_cpu: bool = True) -> None:
    """Import what every rank of ``script`` needs into this process, without starting a thread.

    If Megatron's parser does not accept the arguments, only what the ranks need until they say so.
    ``on_cpu``: with the CPU backend.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from megatron_ttrace import cpu

    path = scripts.as_search_path(scripts.search_path(script))
    with path, quiet_imports(), light_imports(), _asking_nvml():
        import torch

        if on_cpu:
            cpu.activate()
            torch.set_num_threads(1)
        _defer(_DEFERRED)
        is_bridge = scripts.imports_bridge(script)
        for name in (*_MODULES, scripts.BRIDGE) if is_bridge else _MODULES:
            # A release may lack it, or a dependency; what is wrong in a fork, a rank reports.
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        if {"-h", "--help"}.isdisjoint(arguments):
            with contextlib.suppress(Exception):
                _leave_out_help_texts()
        for name in _OURS if is_bridge or accepts(arguments) else ():
            importlib.import_module(name)
        from megatron_ttrace.jobs import fingerprint
        from megatron_ttrace.mcore import imported

        imported.remember()
        # Each version of a file is read here, not in every rank; what cannot be, a rank reports.
        with contextlib.suppress(OSError):
            fingerprint.read()


@contextlib.contextmanager
def light_imports() -> Iterator[None]:
    """Import without looking for garbage: there is next to none, and all that is imported stays.

    Torch notes the line and the module that register an operator. ``inspect.getframeinfo`` would
    read the line's text, too, which nobody uses, and ``inspect.getmodule`` all modules' files.
    """
    getframeinfo, getmodule = inspect.getframeinfo, inspect.getmodule

    def module_of(thing: Any, file: str | None = None) -> types.ModuleType | None:
        if inspect.isframe(thing):
            return sys.modules.get(thing.f_globals.get("__name__", ""))
        return getmodule(thing, file)

    inspect.getframeinfo = lambda frame, context=0: getframeinfo(frame, context=0)
    inspect.getmodule = module_of  # type: ignore[assignment]
    gc.disable()
    try:
        with methods().kept():
            yield
    finally:
        gc.freeze()
        gc.enable()
        inspect.getframeinfo, inspect.getmodule = getframeinfo, getmodule


class _Deferred(types.ModuleType):
    """An installed package that its first use imports.

    ``importlib.util.LazyLoader`` would import it when ``inspect.getmodule`` asks for its file.
    """

    def __getattr__(self, name: str) -> Any:
        """Called for what is not there before the import, and that includes ``__path__``."""
        self.__class__ = types.ModuleType  # type: ignore[assignment]
        assert self.__spec__ is not None
        assert self.__spec__.loader is not None
        self.__path__ = self.__spec__.submodule_search_locations or []
        try:
            self.__spec__.loader.exec_module(self)
        except BaseException:
            del sys.modules[self.__name__]
            raise
        return getattr(self, name)


def _defer(name: str) -> None:
    """Let the first use of a package import it, if it is installed."""
    spec = None if name in sys.modules else importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        del module.__path__
        module.__class__ = _Deferred


def accepts(arguments: Sequence[str]) -> bool:
    """Whether Megatron's parser accepts arguments: whether to import more before the ranks start.

    Arguments that it does not accept may be the script's own. A rank reports what else is wrong,
    such as two flags of a fork with the same name.
    """
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        try:
            return not _parser().parse_known_args(list(arguments))[1]
        except (SystemExit, Exception):  # noqa: BLE001 - what is wrong, a rank reports
            return False


@functools.cache
def _parser() -> argparse.ArgumentParser:
    """Megatron's."""
    from megatron.training import arguments

    parser: argparse.ArgumentParser = arguments.add_megatron_arguments(
        argparse.ArgumentParser(allow_abbrev=False)
    )
    return parser


def _leave_out_help_texts() -> None:
    """Megatron parses its own source for the help texts of its flags, twice in each rank."""
    from megatron.training import argument_utils

    factory: Any = argument_utils.ArgumentGroupFactory
    factory._get_field_docstrings = lambda self, config: {}


def refuses(script: Path, variables: Mapping[str, str]) -> str:
    """Why a fork of this process differs from ``env VARIABLES python SCRIPT``, or ``""``.

    The modules imported here must be the ones that the script would import.
    """
    path = scripts.search_path(script, {**os.environ, **variables})
    imported, origins = scripts.imported(), scripts.origins(path)
    for name in dict.fromkeys((*scripts.MEGATRON, *imported)):
        if imported.get(name) != origins.get(name):
            return f"it has {name} from {origins.get(name, 'nowhere')}"
    module = scripts.shadowed(script, path)
    return f"it has its own module {module}" if module else ""


def fork(command: Sequence[str], environment: dict[str, str], log: Path) -> int:
    """Fork a child that runs ``[python, script, *args]``, and return its process id.

    The child dies with this process (with the thread that forked it, as Linux counts).
    """
    parent = os.getpid()
    environment = {**environment, **ends.announced(ends.file_of(log))}

    def rank() -> None:
        os.setpgid(0, 0)
        # A group in the background that reads from the terminal is stopped.
        null = os.open(os.devnull, os.O_RDONLY)
        try:
            output = owned.create(log, owned.PRIVATE_FILE)
        except OSError:
            # The parent finds out why; here nobody reads a message.
            os._exit(1)
        begin(parent, (null, output, output), environment)
        _, script, *arguments = command
        scripts.run(script, arguments, scripts.search_path(script))

    child = start(rank)
    # Both processes do this, so that the group exists when either continues.
    with contextlib.suppress(OSError):
        os.setpgid(child, child)
    return child


def start(program: Callable[[], None], failed: int = 1) -> int:
    """Fork a child that runs ``program`` to its end (:func:`run_to_end`); its process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    with signals.deferred():
        return os.fork() or run_to_end(program, failed)


def begin(parent: int, streams: Sequence[int], environment: Mapping[str, str]) -> None:
    """Make a fork of ``parent`` like a new process: its three streams, handlers and variables."""
    # What the parent imported is not garbage: looking at it would copy its pages.
    gc.freeze()
    tether.die_with(parent)
    for stream, target in enumerate(streams):
        os.dup2(target, stream)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    # Not before: a Ctrl-C that arrived in the terminal's group is then written to the log.
    signals.reset()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.HANDLED)
    os.environ.clear()
    os.environ.update(environment)


def run_to_end(program: Callable[[], None], failed: int = 1) -> NoReturn:
    """Run what a fork is for, and end as an interpreter does; an error is exit code ``failed``."""
    code = failed
    try:
        program()
        code = 0
    except SystemExit as leaving:
        if isinstance(leaving.code, int | None):
            code = leaving.code or 0
        else:
            print(leaving.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - the child must end here, whatever happened
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


class Requests:
    """The parent's end of the socket over which ranks ask for reference runs."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)
        self._theirs.set_inheritable(True)

    @property
    def environment(self) -> dict[str, str]:
        """What ranks need in their environment."""
        return {_VARIABLE: str(self._theirs.fileno())}

    def poll(self) -> tuple[list[str], list[tuple[dict[str, str], Path]]] | None:
        """The next request, if there is one: a command, and environment and log of each rank."""
        try:
            _, files, _, _ = socket.recv_fds(self._ours, 16, 1)
        except BlockingIOError:
            return None
        lost = "the request for a reference run was lost"
        with reported(lost, OSError, ValueError, LookupError), open(files[0], "rb") as file:
            file.seek(0)
            request: dict[str, Any] = json.loads(file.read())
        ranks = [(environment, Path(log)) for environment, log in request["ranks"]]
        return request["command"], ranks

    def answer(self, code: int, rank: int = 0) -> None:
        """Tell the asking rank that its reference run ended, unless it is dead.

        ``code`` is of the reference's rank that failed first, 0 if none did; ``rank`` its number.
        """
        with contextlib.suppress(OSError):
            self._ours.send(f"{code} {rank}".encode())

    def fileno(self) -> int:
        """For ``select``: readable when there is a request."""
        return self._ours.fileno()

    def close(self) -> None:
        """Close both ends."""
        self._ours.close()
        self._theirs.close()


def available() -> bool:
    """Whether this process was forked by a parent that takes requests."""
    return _VARIABLE in os.environ


def request_ranks(
    command: Sequence[str],
    ranks: Sequence[tuple[Mapping[str, str], Path]],
    timeout: float | None = None,
) -> tuple[int, int]:
    """Ask the parent to run ``[python, script, *args]`` on several ranks.

    ``ranks`` are the environment and the log of each.

    Returns:
        The exit code of the rank that failed first, and its number; the others are ended then. Zero
        if none failed.

    Raises:
        TTraceError: when there is no answer within ``timeout`` seconds and a margin, in which the
            parent should have ended the process.
    """
    # Command lines can be larger than a packet, and environments hold secrets: the packet carries
    # a file in memory, which no other user can open and which no kill leaves behind.
    request = {
        "command": list(command),
        "ranks": [(dict(environment), str(log)) for environment, log in ranks],
    }
    with socket.socket(fileno=os.dup(int(os.environ[_VARIABLE]))) as line:
        with open(os.memfd_create("ttrace-request"), "wb") as file:
            file.write(json.dumps(request).encode())
            file.flush()
            socket.send_fds(line, [b"reference"], [file.fileno()])
        # Not ``settimeout``: that would make the socket, which ranks share, non-blocking for all.
        wait = None if timeout is None else timeout + _MARGIN_SECONDS
        if not select.select([line], [], [], wait)[0]:
            raise TTraceError(f"no reference after {timeout:.0f} s (log: {ranks[0][1]})")
        code, rank = line.recv(64).decode().split()
        return int(code), int(rank)
