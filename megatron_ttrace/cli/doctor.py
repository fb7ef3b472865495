# SPDX-License-Identifier: Apache-2.0
"""``ttrace doctor``: what is installed, what is missing, and where checks will run."""

import argparse
import contextlib
import dataclasses
import faulthandler
import importlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from megatron_ttrace.mcore import versions
from megatron_ttrace.mcore.fronts import bridge_release
from megatron_ttrace.trace import compiled
from megatron_ttrace.trace.errors import ExitCode, TTraceError, one_line
from megatron_ttrace.trace.sanitise import log_line

SUMMARY = "show what is installed and where checks will run"
EPILOG = """\
example:
  ttrace doctor
  ttrace doctor --json
  ttrace doctor --online    # also asks the package index

exit code: 0 if checks can run here, 2 if a package that every check needs is missing
"""
_GIB = 1 << 30
_PIP_SECONDS = 60
_PIP = (
    "--disable-pip-version-check install --dry-run --no-deps --ignore-installed "
    "--only-binary :all: --quiet --report -"
).split()


@dataclasses.dataclass(frozen=True)
class Finding:
    """One row: a subject, whether it is sufficient (``state``), what was found, what to do."""

    subject: str
    state: str
    found: str
    advice: str = ""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument(
        "--online",
        action="store_true",
        help="ask the package index, through pip, for newer patch releases of megatron-core",
    )


def run(args: argparse.Namespace) -> int:
    """Inspect everything and show the findings."""
    with versions.quiet_imports(), _quiet_libraries() as messages:
        needed = [_attempt(subject, look, "missing") for subject, look in _NEEDED.items()]
        optional = _OPTIONAL | ({"releases": _releases} if args.online else {})
        findings = [_attempt(subject, look, "optional") for subject, look in optional.items()]
    broken = [finding.subject for finding in needed if finding.state == "missing"]
    findings = [*needed, *findings, _checks(broken)]
    if args.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1))
    else:
        _show(findings)
    for message in messages if broken else ():
        print(log_line(message), file=sys.stderr)
    return ExitCode.COULD_NOT_CHECK if broken else ExitCode.EQUIVALENT


@contextlib.contextmanager
def _quiet_libraries() -> Iterator[list[str]]:
    """Collect what libraries write to standard error while they are imported.

    They warn of hardware and drivers that are absent, which is in the table. A crash is reported.
    """
    messages: list[str] = []
    sys.stderr.flush()
    with tempfile.TemporaryFile() as file:
        original = os.dup(2)
        reports_crash = not faulthandler.is_enabled()
        if reports_crash:
            faulthandler.enable(original)
        os.dup2(file.fileno(), 2)
        try:
            yield messages
        finally:
            sys.stderr.flush()
            os.dup2(original, 2)
            if reports_crash:
                faulthandler.disable()
            os.close(original)
            file.seek(0)
            messages += file.read().decode(errors="replace").splitlines()


def _attempt(subject: str, look: Callable[[], Finding], state: str) -> Finding:
    """A finding, also if looking failed: a broken installation can raise any exception."""
    try:
        return look()
    except metadata.PackageNotFoundError:
        found = "not installed"
    except Exception as error:  # noqa: BLE001
        found = str(error) if isinstance(error, TTraceError) else f"not usable ({one_line(error)})"
    return Finding(subject, state, found[:200], _ADVICE.get(subject, ""))


def _show(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for title in ("what", "state", "found"):
        table.add_column(title)
    colours = {"ok": "green", "missing": "red", "optional": "yellow"}
    for finding in findings:
        text = "; ".join(filter(None, (finding.found, finding.advice)))
        state = Text(finding.state, style=colours[finding.state])
        table.add_row(finding.subject, state, Text(text))
    Console().print(table)


def _python() -> Finding:
    return Finding("Python", "ok", platform.python_version())


def _torch() -> Finding:
    torch = importlib.import_module("torch")
    backends = _backends()
    if not backends:
        text = f"{torch.__version__}, neither gloo nor NCCL"
        return Finding("torch", "missing", text, "ranks need one: pip install torch")
    return Finding("torch", "ok", f"{torch.__version__}, {' and '.join(backends)}")


def _backends() -> list[str]:
    distributed = importlib.import_module("torch.distributed")
    if not distributed.is_available():
        return []
    usable = {"gloo": distributed.is_gloo_available(), "NCCL": distributed.is_nccl_available()}
    return [name for name, is_usable in usable.items() if is_usable]


def _megatron() -> Finding:
    versions.check_supported()
    version = versions.megatron_core_version()
    return Finding("megatron-core", "ok", version, versions.unreleased(version))


def newer_releases() -> dict[str, str]:
    """Supported versions, and the newer release of their series that pip finds on its index.

    A release of the series of Megatron-LM's main is newer than what was tried of main. Nothing
    else in this package uses a network. Raises ``TTraceError`` without pip, or without an answer.
    """
    newest = {version: _newest(version) for version in versions.SUPPORTED}
    newer = {old: new for old, new in newest.items() if _numbers(new) > _numbers(old)}
    # That of main fails until there is one; the index answered the questions before.
    with contextlib.suppress(TTraceError):
        newer[versions.MAIN] = _newest(versions.MAIN)
    return newer


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


def _newest(version: str) -> str:
    """The newest release of a version's series that pip would install on this machine.

    pip skips pre-releases and yanked releases, and installs nothing with ``--dry-run``.
    """
    wanted = f"megatron-core=={versions.series(version)}.*"
    command_ = [sys.executable, "-m", "pip", *_PIP, wanted]
    try:
        done = subprocess.run(
            command_, capture_output=True, text=True, timeout=_PIP_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise TTraceError(f"pip did not answer within {_PIP_SECONDS} s") from error
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise TTraceError(f"pip cannot list megatron-core: {reason}")
    return str(json.loads(done.stdout)["install"][0]["metadata"]["version"])


def _releases() -> Finding:
    newer = newer_releases()
    if not newer:
        return Finding("releases", "ok", f"none is newer than {' and '.join(versions.SUPPORTED)}")
    text = ", ".join(f"{newest} (tested: {version})" for version, newest in newer.items())
    return Finding("releases", "optional", text, "checked like its series")


def _options() -> Finding:
    """Options that this Megatron registers and a reference cannot know what to make of."""
    from megatron_ttrace.mcore.options.roles import ROLES

    with versions.quiet_imports():
        arguments = importlib.import_module("megatron.training.arguments")
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    flags = {action.option_strings[-1]: action.dest for action in parser._actions}
    new = [flag for flag, option in flags.items() if option not in ROLES]
    new.remove("--help")
    if not new:
        return Finding("options", "ok", f"all {len(flags) - 1} of Megatron's are known")
    text = f"{len(new)} of {len(flags) - 1} of Megatron's are new: {', '.join(sorted(new))}"
    return Finding("options", "optional", text, "a reference has them as the job has them")


def _device() -> Finding:
    torch = importlib.import_module("torch")
    count = torch.cuda.device_count()
    if not count:
        return Finding("GPU", "optional", "none", "the CPU backend is used")
    properties = torch.cuda.get_device_properties(0)
    text = f"{count} x {properties.name}, {properties.total_memory / _GIB:.0f} GiB"
    if "NCCL" not in _backends():
        advice = "this torch has no NCCL, which several GPUs need: install a CUDA build"
        return Finding("GPU", "optional", text, advice)
    return Finding("GPU", "ok", text)


def _checks(broken: list[str]) -> Finding:
    if broken:
        return Finding("checks", "missing", "cannot run here", f"first fix {', '.join(broken)}")
    count = importlib.import_module("torch").cuda.device_count()
    if not count:
        text = "reference and ranks on this machine's CPU over gloo, TransformerEngine emulated"
        return Finding("checks", "ok", text)
    ranks = "1 rank" if count == 1 else f"up to {count} ranks"
    text = f"reference on the first GPU, {ranks} on GPUs"
    return Finding("checks", "ok", text, "more ranks on the CPU with --ttrace-device cpu")


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free
    text = f"{free / _GIB:.0f} GiB free"
    if free > _GIB:
        return Finding("disk", "ok", text)
    advice = "a reference trace of a small model takes 0.1 to 1 GB"
    return Finding("disk", "optional", text, advice)


def _comparison() -> Finding:
    if all(compiled.load(name) for name in compiled.NAMES):
        return Finding("comparison", "ok", "compiled")
    advice = "with a C compiler here when it is installed, CPUs compare several times as fast"
    return Finding("comparison", "optional", "by PyTorch", advice)


def _transformer_engine() -> Finding:
    # Installed is not importable: the wheel exists without its PyTorch part.
    module = importlib.import_module("transformer_engine.pytorch")
    version = metadata.version("transformer-engine")
    return Finding("TransformerEngine", "ok", f"{version} ({module.__name__})")


def _bridge() -> Finding:
    subject, home = "Megatron-Bridge", bridge_release.folder()
    if home is None:
        advice = "only for jobs of Megatron-Bridge (docs/bridge.md)"
        return Finding(subject, "optional", "not installed", advice)
    version = bridge_release.version() or "of unknown version"
    if lacking := bridge_release.lacking(home):
        text = f"{version} has no {', '.join(lacking)}"
        return Finding(subject, "optional", text, f"tested: {', '.join(bridge_release.TESTED)}")
    advice = "" if version in bridge_release.TESTED else "not a release that was tested"
    return Finding(subject, "ok", f"{version}, with all that is wrapped", advice)


def _transformers() -> Finding:
    from megatron_ttrace.saved.huggingface import comparison  # which imports torch

    version = comparison.version()
    advice = "" if version == comparison.TESTED else f"tested: {comparison.TESTED}"
    return Finding("transformers", "ok", version, advice)


def _apex() -> Finding:
    importlib.import_module("apex.normalization.fused_layer_norm")
    return Finding("Apex", "ok", "importable")


def _tracker(subject: str, use: str) -> Finding:
    return Finding(subject, "ok", metadata.version(subject.lower()), use)


_ADVICE = {
    "torch": "pip install torch",
    "TransformerEngine": "without a GPU it is emulated; with one, pip install "
    "'megatron-ttrace[gpu]'",
    "Apex": "build it from NVIDIA's source; the package named apex on the index is another project",
    "wandb": "pip install wandb to log verdicts",
    "TensorBoard": "pip install tensorboard for scalars beside the training curves",
}
"""What to do about what cannot be used."""


_NEEDED = {"Python": _python, "torch": _torch, "megatron-core": _megatron}
_OPTIONAL = {
    "GPU": _device,
    "disk": _disk,
    "options": _options,
    "comparison": _comparison,
    "TransformerEngine": _transformer_engine,
    "Apex": _apex,
    "Megatron-Bridge": _bridge,
    "transformers": _transformers,
    "wandb": lambda: _tracker("wandb", "used with --ttrace-wandb, or if the job has a run"),
    "TensorBoard": lambda: _tracker("TensorBoard", "used with --tensorboard-dir"),
}
