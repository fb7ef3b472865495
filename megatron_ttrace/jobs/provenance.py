# SPDX-License-Identifier: Apache-2.0
"""What identifies a run: its command, script and Megatron, the host, user and date."""

import contextlib
import datetime
import functools
import getpass
import hashlib
import importlib.metadata
import json
import os
import platform
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from megatron_ttrace.jobs import argv
from megatron_ttrace.jobs import script as scripts
from megatron_ttrace.jobs.commands import disclosure
from megatron_ttrace.jobs.processes import worktrees
from megatron_ttrace.mcore import versions
from megatron_ttrace.mcore.arguments import MegatronArguments
from megatron_ttrace.trace import shared
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.records import Code, Run
from megatron_ttrace.trace.version import __version__

COMMAND = "TTRACE_COMMAND"
"""Environment variable: the launcher's command line, for its ranks, as a JSON list."""

SHRUNK = "TTRACE_SHRUNK"
"""Environment variable: what the job under check stands for, if that is a larger one."""
NODES = "TTRACE_NODES"
"""Environment variable: on how many machines its ranks seem to be, without a GPU."""

_GIT_SECONDS = 5.0
_DISTRIBUTIONS = (
    *("megatron-core", "megatron-bridge", "torch", "transformer-engine", "transformers"),
    *("safetensors", "wandb", "numpy", "triton", "apex", "flash-attn", "grouped-gemm", "deep-ep"),
    *("emerging-optimizers", "mamba-ssm", "causal-conv1d", "flash-linear-attention", "tilelang"),
    "fast-hadamard-transform",
)
_NAMES = ("PYTHONPATH", "PYTHONSAFEPATH", "PYTHONHASHSEED", "LD_PRELOAD", "NVIDIA_TF32_OVERRIDE")
_PREFIXES = (
    *("ATEN_", "CUBLAS", "CUDA_", "CUDNN_", "DNNL_", "FLASH_", "GLOO_", "MEGATRON", "MKL_"),
    *("NCCL_", "NVTE_", "OMP_", "ONEDNN_", "PYTORCH_", "TORCH", "TRITON_", "TTRACE_", "UCX_"),
)
_INTERNAL = (COMMAND, "TTRACE_FORKSERVER", "TTRACE_EDITS", "TTRACE_EDITS_ROOT")
_NUMERIC_NAMES = ("NVIDIA_TF32_OVERRIDE", "OMP_NUM_THREADS")
_NUMERIC_PREFIXES = (
    *("ATEN_", "CUBLAS", "CUDNN_", "DNNL_", "FLASH_", "MKL_", "NVTE_", "ONEDNN_"),
    *("TORCH_ALLOW_TF32", "TORCH_CUDNN_", "TORCHINDUCTOR_"),
)

_HARMLESS_NAMES = (
    *("HOME", "HOSTNAME", "LD_LIBRARY_PATH", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "PATH"),
    *("RANK", "USER", "WORLD_SIZE", "TMPDIR"),
)
_HARMLESS_PREFIXES = (
    *("CUDA_", "GLOO_", "HF_", "MASTER_", "MEGATRON_LOGGING", "NCCL_", "NVSHMEM_", "OMPI_", "PMI_"),
    *("OTEL_", "PYTORCH_ALLOC", "PYTORCH_CUDA_ALLOC", "SLURM_", "TORCHELASTIC_", "TORCH_CPP_"),
    *("TORCH_DISTRIBUTED_", "TORCH_FR_", "TORCH_NCCL_", "TORCH_UCC_", "UCC_", "UCX_", "WANDB_"),
)
"""Of ranks, communication, memory and logs."""

_began = ""
_environment: dict[str, str] = {}
_folder: list[Path] = []


def begin() -> None:
    """Record the time, folder and environment of a run; later calls do nothing.

    Megatron itself sets variables while it builds a model.
    """
    global _began
    if not _began:
        _began = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        _environment.update(os.environ)
        _folder.append(Path.cwd())


def command_line(words: Sequence[str] = ()) -> str:
    """A command, by default this process's, as a JSON list, without values that may be secret."""
    if not words:
        as_ttrace = os.path.basename(sys.argv[0] or "") == "ttrace"
        words = sys.argv if as_ttrace else sys.orig_argv
    return json.dumps(disclosure.command(words))


def require_found() -> None:
    """Check that the imported Megatron is the one that ``sys.path`` leads to now.

    Raises ``TTraceError`` when the script changed ``sys.path`` after Megatron had been imported for
    it.
    """
    imported = scripts.imported()
    for name, file in scripts.origins(sys.path).items():
        if imported.get(name, file) != file:
            folder = Path(file).parents[2]
            raise TTraceError(
                f"{name} was imported from {imported[name]}, but the script then put {file} on "
                f"sys.path: run with PYTHONPATH={folder}"
            )


def placed(directory: Path) -> Path:
    """A directory as it was named when the run began: the script may have changed its folder."""
    moved = _folder and Path.cwd() != _folder[0]
    return _folder[0] / directory if moved else directory


def shown(path: Path) -> Path:
    """A path as it is named in the folder in which the run began, if it is in there."""
    inside = _folder and path.is_relative_to(_folder[0])
    return path.relative_to(_folder[0]) if inside else path


def megatron() -> Code:
    """The Megatron that this process imported."""
    core = Path(scripts.imported()["megatron.core"]).parent
    return _code(versions.megatron_core_version(), core.parent, core / "package_info.py")


def ttrace() -> Code:
    """This package."""
    folder = Path(__file__).resolve().parents[1]
    return _code(__version__, folder, folder / "__init__.py")


def collect(args: MegatronArguments) -> Run:
    """The record of this run, on the rank that writes the summary."""
    begin()
    script = Path(argv.script())
    return Run(
        id=shared.run_id(),
        command=tuple(json.loads(os.environ.get(COMMAND) or command_line())),
        script=os.path.abspath(script),
        script_sha256=_sha256(script),
        megatron=megatron(),
        ttrace=ttrace(),
        host=socket.gethostname(),
        user=_user(),
        date=_began,
        environment=disclosure.environment(_chosen(_environment, _NAMES, _PREFIXES)),
        seed=int(args.seed),
    )


def numeric_environment(read: Collection[str] = ()) -> dict[str, str]:
    """Variables that can change numbers on a single device: values, or digests of them.

    So may those that are ``read``, but for a few.
    """
    begin()
    harmless = _chosen(_environment, _HARMLESS_NAMES, _HARMLESS_PREFIXES)
    names = (*_NUMERIC_NAMES, *(name for name in read if name not in harmless))
    chosen = _chosen(_environment, names, _NUMERIC_PREFIXES)
    shown = disclosure.environment(chosen)
    return {
        name: str(disclosure.identity(value, allowed=shown[name] != disclosure.HIDDEN))
        for name, value in chosen.items()
    }


def named(texts: Collection[str]) -> set[str]:
    """Variables of this run that are named by texts, or whose names begin with one that ends in _.

    As a function is given a name, or a part of it. Not ours.
    """
    begin()
    begins = tuple(text for text in texts if text.endswith("_"))
    return {
        name
        for name in _environment
        if (name in texts or name.startswith(begins)) and not name.startswith("TTRACE_")
    }


def commit_of(file: Path) -> tuple[str, bool]:
    """The commit of the git checkout that tracks ``file``, and whether tracked files differ.

    The commit is empty without git, and for an installed package that is in the folder of a
    repository without being part of it.
    """
    folder = file.parent
    tracked = git(folder, "ls-files", "--error-unmatch", "--", file.name)
    commit = git(folder, "rev-parse", "HEAD") if tracked else None
    if commit is None:
        return "", False
    return commit.strip(), bool(git(folder, "status", "--porcelain", "--untracked-files=no"))


def git(folder: Path, *words: str) -> str | None:
    """What git prints in a folder; ``None`` if it fails."""
    try:
        return worktrees.git(folder, *words, seconds=_GIT_SECONDS)
    except TTraceError:
        return None


@functools.cache
def _code(version: str, folder: Path, file: Path) -> Code:
    commit, dirty = commit_of(file)
    return Code(version=version, path=str(folder), commit=commit, dirty=dirty)


def _chosen(
    environment: Mapping[str, str], names: tuple[str, ...], prefixes: tuple[str, ...]
) -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(environment.items())
        if (name in names or name.startswith(prefixes)) and name not in _INTERNAL
    }


def _sha256(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return ""


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return str(os.getuid())


def emulates_transformer_engine() -> bool:
    """Whether this process runs the stand-in of ``cpu/te``."""
    from megatron_ttrace.cpu import te

    return te.emulated()


def installed() -> dict[str, str]:
    """Versions of everything that can change a number, for fingerprints and reports."""
    from megatron_ttrace.cpu.te import releases  # imports torch

    by_package = {"megatron-ttrace": __version__, "python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            by_package[name] = importlib.metadata.version(name)
    if emulates_transformer_engine():
        by_package["transformer-engine"] = f"{releases.current()} (emulated)"
    with contextlib.suppress(ImportError):
        by_package["megatron-core"] = versions.megatron_core_version()
    return by_package
