# SPDX-License-Identifier: Apache-2.0
"""The identity of a reference: arguments, data, code and versions that its numbers depend on.

Candidates with the same identity share a reference, whatever their layouts. Everything counts that
is not known to be harmless: an unnecessary reference costs seconds, a stale one a false verdict.
"""

import functools
import hashlib
import json
import os
import re
import shlex
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_ttrace.jobs import argv, inputs, opened, provenance
from megatron_ttrace.jobs import script as scripts
from megatron_ttrace.jobs.commands import disclosure
from megatron_ttrace.jobs.commands.disclosure import is_shown
from megatron_ttrace.jobs.reference_arguments import overrides_of
from megatron_ttrace.jobs.settings import Settings
from megatron_ttrace.mcore import contents, fronts, own_shards, samples
from megatron_ttrace.mcore.arguments import MegatronArguments
from megatron_ttrace.mcore.options.decisions import QUIET, SINGLE_DEVICE
from megatron_ttrace.mcore.options.roles import ROLES, Role

FIM_BY_SAMPLE = "fim_by_sample"
"""Whether samples are rearranged by their index (:mod:`megatron_ttrace.mcore.samples`)."""

PADDED_FOR = "conversations padded for context-parallel ranks"
"""How many."""

DEALT_TO = "data-parallel ranks that shuffled samples are dealt to"
"""How many."""

IN_BLOCKS = "tensor-parallel ranks whose blocks of a matrix are stepped by themselves"
"""How many: tp, etp."""

_ISOLATE = "isolate"
_TOLD = "told"
"""The part of an identity that is reported but not compared."""
_HARMLESS_PREFIXES = tuple(
    """
    log_ tensorboard_ wandb_ save exit_ eval_ timing_ distributed_ profile inprocess_
    ckpt_ dist_ckpt_ non_persistent_ straggler_ one_logger ft_
    """.split()
)
"""Of options of Megatron's: a fork's may mean anything."""
_OWN = Path(__file__).parents[1]
_ADDRESS = re.compile(" at 0x[0-9a-f]+")
_DERIVED = frozenset(
    {
        *("params_dtype", "skipped_train_samples", "virtual_pipeline_model_parallel_size"),
        *("gtp_weight_remat_size", "expert_gtp_weight_remat_size"),
    }
)
"""What Megatron computes from its options, and the report may show."""
_HARMLESS = frozenset(
    """
    rank local_rank world_size data_parallel_size transformer_pipeline_model_parallel_size
    num_workers enable_one_logger use_dist_ckpt data_cache_path consumed_train_samples
    consumed_valid_samples align_param_gather align_grad_reduce variable_seq_lengths
    padded_vocab_size iteration curr_iteration model_type num_floating_point_operations_so_far
    """.split()
)


def identity(args: MegatronArguments, settings: Settings) -> dict[str, Any]:
    """Everything the reference of this candidate depends on, as JSON values."""
    derived = {**vars(args), **SINGLE_DEVICE, **QUIET, **overrides_of(args)}
    arguments = {
        name: disclosure.identity(_plain(value), allowed=name in _DERIVED or is_shown(name))
        for name, value in sorted(derived.items())
        if not _is_harmless(name) and name not in SINGLE_DEVICE and name not in QUIET
    }
    variables: set[str] = set()
    digests = code(Path(argv.script()), variables)
    return {
        "arguments": arguments,
        "ttrace": {
            "iterations": list(settings.iterations),
            "init": settings.init,
            "seeds": settings.seeds,
            _ISOLATE: by_module(args, settings),
            "reference_args": _arguments(settings.reference_args),
            "reference_layout": str(settings.reference_layout or ""),
            "device": _device(),
            FIM_BY_SAMPLE: samples.is_by_sample(args, exits=settings.exit_after),
            PADDED_FOR: samples.padded_for(args),
            DEALT_TO: samples.dealt_to(args),
            IN_BLOCKS: own_shards.ranks_of_blocks(args),
        },
        "data": _data(args) | _in_files({name: derived[name] for name in arguments}),
        "environment": provenance.numeric_environment(variables),
        "code": digests,
        "versions": provenance.installed(),
        **_own_words(),
        _TOLD: {"megatron": str(_folder_of("megatron.core").parent)},
    }


def by_module(args: MegatronArguments, settings: Settings) -> bool | None:
    """Whether replays in 16 bits give each module the reference's inputs.

    A candidate that is isolated can also be judged by others: ``None`` if a reference is given.
    """
    wanted = settings.isolate and args.params_dtype.itemsize == 2 and not getattr(args, "fp8", 0)
    return None if wanted and settings.reference else wanted


def _own_words() -> dict[str, Any]:
    """A digest of the words that no parser of Megatron's sees, and of the files that they name.

    It decides whether a reference is found, but not whether one that the user gives fits: of words
    it is not known whether they change more than the layout.
    """
    words = argv.kept() if fronts.current().has_flags else argv.given()
    named = (word.partition("=")[2] if word.startswith("-") else word for word in words)
    files = [opened.stamp(file) for file in named if os.path.isfile(file)]
    return {"words": disclosure.identity([words, files], allowed=False)} if words else {}


def _is_harmless(name: str) -> bool:
    """Whether no number depends on an attribute of Megatron's arguments."""
    # Of statistics that are computed if they are logged, the option decides which code runs.
    runs = ROLES.get(name, Role.CODE) is Role.CODE
    known = not runs and name.startswith(_HARMLESS_PREFIXES)
    return known or name in _HARMLESS or name.startswith("ttrace")


def code(script: Path, variables: set[str] | None = None) -> dict[str, str]:
    """Digests of a script, of what else it imported that is not installed, of Megatron and of us.

    Megatron is what this process has imported, or would import. The environment variables that this
    code reads, but ours, are added to ``variables``.
    """
    reads = set() if variables is None else variables
    beside = _beside(script)
    reads |= _named_in([script, *beside.values()])
    return {
        "script": _content({script.name: script}, reads),
        "modules beside the script": _content(beside, reads),
        "megatron_ttrace": _tree(_OWN, set()),
        **{name: _tree(_folder_of(name), reads) for name in _packages()},
    }


def read() -> None:
    """Read the packages that :func:`code` will, for forks of this process; no run begins here.

    Each look at a file notices another version. Links to a user's folders may change, so those are
    left to each rank.
    """
    for folder in (_OWN, *map(_folder_of, _packages())):
        _tree(folder, set())


def _packages() -> list[str]:
    return [*dict.fromkeys((*scripts.MEGATRON, *scripts.imported()))]


def imported() -> dict[str, tuple[str, str]]:
    """Digest and file of the modules beside the script: functions have imported some only now."""
    files = _beside(Path(argv.script()))
    return {name: (_module(name, path), str(path)) for name, path in files.items()}


def changed(modules: Mapping[str, tuple[str, str]]) -> str:
    """The first of these modules, :func:`imported` in another process, that is different here."""
    if not modules:
        return ""
    script = Path(argv.script())
    here, folders = _beside(script), [str(script.resolve().parent), *filter(None, sys.path)]
    for name, (known, elsewhere) in modules.items():
        stem = name.replace(".", os.sep)
        files = (Path(f, end) for f in folders for end in (f"{stem}.py", f"{stem}/__init__.py"))
        path = here.get(name) or next(filter(Path.is_file, files), Path(elsewhere))
        if _module(name, path) != known:
            return name
    return ""


def _module(name: str, path: Path) -> str:
    """A digest of a module, and of the environment variables that it reads."""
    reads = _named_in([path])
    content = _content({name: path}, reads)
    values = provenance.numeric_environment(reads)
    return _digest([content, {name: values.get(name) for name in sorted(reads)}])


def _named_in(files: Iterable[Path]) -> set[str]:
    """The environment variables that a user's files may read, by names that they put together."""
    return provenance.named(frozenset().union(*map(contents.texts_of, files)))


def digest(identity_: dict[str, Any]) -> str:
    """A short name for an identity. It does not depend on where the code is."""
    return _digest({name: value for name, value in identity_.items() if name != _TOLD})


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def differences(
    ours: dict[str, Any], theirs: dict[str, Any], *, any_megatron: bool = False
) -> list[str]:
    """How two identities differ, in words, the most important difference first.

    ``ours`` is of the reference that is needed, ``theirs`` of an existing one, which any Megatron
    may have made if ``any_megatron``.
    """
    lines = []
    for part in ("arguments", "ttrace", "data", "start", "environment", "versions", "code"):
        needed, existing = ours.get(part) or {}, theirs.get(part) or {}
        for name in sorted({*needed, *existing}):
            if any_megatron and name in (*scripts.MEGATRON, "megatron-core"):
                continue
            if name == _ISOLATE and needed[name] is None:
                continue
            if (a := needed.get(name)) != (b := existing.get(name)):
                lines.append(f"{name} is {a!r} here and {b!r} there")
    return lines


def other_megatron(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Which other Megatron made a reference, in words; empty if it was the same."""
    code = theirs.get("code") or {}
    if all(ours["code"][name] == code.get(name) for name in scripts.MEGATRON):
        return ""
    return (
        f"made by a different Megatron, {_named(theirs)}; this run has {_named(ours)}. Omit the "
        "flag to make a matching reference, or add --ttrace-allow-other-megatron"
    )


def _named(identity_: dict[str, Any]) -> str:
    version = (identity_.get("versions") or {}).get("megatron-core", "of unknown version")
    return f"{version} in {(identity_.get(_TOLD) or {}).get('megatron', 'an unknown place')}"


def _plain(value: Any) -> Any:
    if isinstance(value, bool | int | float | str | None):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    # Functions and objects print their address, which is another one in each process.
    return _ADDRESS.sub("", str(value))


def _arguments(words: str) -> list[str]:
    """Arguments as far as they may be shown, and a digest of all of them."""
    if not words.strip():
        return []
    digest_of_all = disclosure.identity(words, allowed=False)
    return [*disclosure.command(shlex.split(words)), str(digest_of_all)]


def _device() -> str:
    from megatron_ttrace import cpu

    if cpu.active():
        return "cpu"
    import torch

    return torch.cuda.get_device_name()


def _data(args: MegatronArguments) -> dict[str, Any]:
    """Sizes and modification times of the data files, whose content is too large to read."""
    stamps: dict[str, Any] = {}
    for path in inputs.of_data(args):
        # The tokenizers of transformers are folders.
        for file in sorted(path.glob("*")) if path.is_dir() else [path]:
            if file.is_file():
                stat = file.stat()
                stamps[str(file)] = [stat.st_size, stat.st_mtime_ns]
    return stamps


def _in_files(options: Mapping[str, Any]) -> dict[str, Any]:
    """What the files contain that other options name, as configurations; of a large one as data."""
    found: dict[str, Any] = {}
    for option, value in options.items():
        for word in value if isinstance(value, list | tuple) else [value]:
            if isinstance(word, str) and os.path.isfile(word):
                found.setdefault(option, []).append(opened.stamp(word))
    return found


def _content(files: Mapping[str, str | Path], reads: set[str]) -> str:
    """A hash of files and of their names, which do not depend on where they are.

    The environment variables that they read are added to ``reads``.
    """
    total = hashlib.sha256()
    for name, path in files.items():
        if content := contents.content_of(path):
            total.update(f"{name}:".encode(errors="surrogateescape") + content.sha256)
            reads |= content.variables
    return total.hexdigest()[:16]


def _folder_of(package: str) -> Path:
    file = scripts.imported().get(package) or scripts.origins(sys.path)[package]
    return Path(file).parent


def opened_files(args: MegatronArguments, apart: Iterable[Path]) -> dict[str, str]:
    """What this process has read (:mod:`megatron_ttrace.jobs.opened`), but for what counts anyway.

    That is Megatron's code and ours. Nor what is made anew, in the folders ``apart`` and in those
    that options name.
    """
    known = [_OWN, *map(_folder_of, _packages())]
    named = (getattr(args, name, None) for name in _FOLDERS)
    return opened.files(_home(), [*known, *apart, *filter(None, named)])


def changed_file(known: Mapping[str, str], *, absent: bool) -> str:
    """The first of :func:`opened_files` that is different. ``absent``: also if it is not there."""
    return opened.changed(known, _home(), absent=absent)


def _home() -> Path:
    return provenance.placed(Path(argv.script())).absolute().parent


_FOLDERS = ("data_cache_path", "load", "pretrained_checkpoint", "save", "tensorboard_dir")


def _tree(folder: Path, reads: set[str]) -> str:
    """A hash of a package's Python files and compiled modules: in Megatron about 8 MB."""
    return _content(contents.python_files(folder, contents.CODE), reads)


def _beside(script: Path) -> dict[str, Path]:
    """Files of the modules that were imported from beside the script, or through PYTHONPATH.

    Not Megatron's and ours, which count as a whole, nor installed packages, which have versions.
    """
    foreign = [_OWN, *map(_folder_of, _packages())]
    foreign += [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
    roots = tuple(os.path.join(os.path.realpath(root), "") for root in foreign)
    folders = [script.resolve().parent, *filter(None, sys.path)]
    inside = tuple(os.path.join(_resolved(folder), "") for folder in folders)
    files = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.endswith(contents.CODE):
            continue
        path = _placed(file)
        if (
            path.startswith(inside)
            and not path.startswith(roots)
            and not any(part in path for part in _INSTALLED)
        ):
            files[name] = Path(path)
    own = {script.resolve(), Path(_placed(str(script)))}
    return {name: path for name, path in sorted(files.items()) if path not in own}


def _placed(file: str) -> str:
    """A file in its real folder; thousands of files, of which each may be a link, are in few."""
    folder, name = os.path.split(file)
    return os.path.join(_resolved(folder), name)


@functools.cache
def _resolved(folder: str) -> str:
    """As ``os.path.realpath``, which would look at the folders above each folder again."""
    above, name = os.path.split(folder)
    if not above or name in ("", ".", ".."):
        return os.path.realpath(folder)
    path = os.path.join(_resolved(above), name)
    return os.path.realpath(path) if os.path.islink(path) else path


_INSTALLED = ("/site-packages/", "/dist-packages/")
