# SPDX-License-Identifier: Apache-2.0
"""Find all single faults in Megatron's parallel code, and choose a sample of them.

Source is read; nothing is imported or run.
"""

import ast
import fnmatch
import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType

from megatron_ttrace.evaluation.bugs.patching import rewrite
from megatron_ttrace.mcore.sources import megatron_folder
from megatron_ttrace.trace.changes import outermost
from megatron_ttrace.trace.errors import TTraceError
from tests.assay.mutants.operators import OPERATORS
from tests.assay.mutants.records import Mutant
from tests.assay.mutants.source import Source, span_of

_CLASS = re.compile(r"\b[A-Z]\w*(?=\.)")
_WILDCARD = re.compile(r"[*?\[]")
PACKAGES = (
    "megatron.core.tensor_parallel",
    "megatron.core.distributed",
    "megatron.core.pipeline_parallel",
    "megatron.core.transformer.moe",
    "megatron.core.optimizer",
    "megatron.core.ssm",
    "megatron.core.transformer.transformer_layer",
)
"""Packages, or single modules."""


def scan(patterns: Sequence[str] = ()) -> list[Mutant]:
    """The mutants of the installed Megatron whose ids match a pattern, in the order of its source.

    Without patterns these are all of them.
    """
    # Reading a module takes a while: where each pattern names one, the others are left out.
    wanted = {f"megatron.core.{pattern.partition(':')[0]}" for pattern in patterns}
    is_named = not any(_WILDCARD.search(name) for name in wanted)
    return [
        mutant
        for module, path in modules()
        if not patterns or not is_named or module in wanted
        for mutant in scan_source(module, path.read_text(encoding="utf-8"))
        if not patterns or any(fnmatch.fnmatchcase(mutant.id, pattern) for pattern in patterns)
    ]


def modules() -> list[tuple[str, Path]]:
    """Names and files of all modules below :data:`PACKAGES`."""
    root = Path(megatron_folder(), "core")
    found = []
    for package in PACKAGES:
        place = root.joinpath(*package.split(".")[2:])
        for path in (place.with_suffix(".py"), *sorted(place.rglob("*.py"))):
            if path.is_file() and (path.name != "__init__.py" or path.stat().st_size > 0):
                name = ".".join(path.relative_to(root.parents[1]).with_suffix("").parts)
                # A package's file has the package's name; with another it would be a copy.
                found.append((name.removesuffix(".__init__"), path))
    return found


def autograd_files() -> list[Path]:
    """All files with autograd functions: classes that other code hands numbers to."""
    return [
        path
        for path in sorted(Path(megatron_folder(), "core").rglob("*.py"))
        if "autograd.Function)" in path.read_text(encoding="utf-8")
    ]


def scan_source(module: str, text: str) -> Iterator[Mutant]:
    """The mutants of one module: every operator on every node inside a function."""
    source = Source(module, text)
    seen: Counter[str] = Counter()
    for qualname, function in outermost(source.tree):
        # Only what runs when the function does: no decorators, defaults or annotations.
        for node in (node for statement in function.body for node in ast.walk(statement)):
            for name, operator in OPERATORS.items():
                for target, replacement in operator(node, source):
                    yield _mutant(source, qualname, name, target, replacement, seen)


def _mutant(
    source: Source,
    qualname: str,
    operator: str,
    target: ast.AST,
    replacement: str,
    seen: Counter[str],
) -> Mutant:
    fragment = source.of(target)
    around = source.statement(target)
    statement = "" if around is None else ast.unparse(around).split("\n", 1)[0]
    words = (source.module, qualname, operator, statement, fragment, replacement)
    # Without white space, so that a line break does not change the id.
    content = "\n".join("".join(word.split()) for word in words)
    # Where a function has the same statement twice, the number tells them apart.
    number = seen[content]
    seen[content] += 1
    digest = _sha256(f"{content}\n{number}")[:6]
    place = source.module.removeprefix("megatron.core.")
    return Mutant(
        id=f"{place}:{qualname}:{operator}:{digest}",
        module=source.module,
        qualname=qualname,
        operator=operator,
        span=span_of(target),
        fragment=fragment,
        replacement=replacement,
        statement=statement,
        classes=() if around is None else _classes(around, source),
    )


def _classes(statement: ast.stmt, source: Source) -> tuple[str, ...]:
    """Classes whose attributes are used near a statement, or in what finds a name used there."""
    branch = source.parent(statement)
    near = branch if isinstance(branch, ast.If) else statement
    names = {node.id for node in ast.walk(near) if isinstance(node, ast.Name)}
    text = "\n".join([ast.unparse(near), *(source.finder(name) for name in sorted(names))])
    return tuple(sorted(set(_CLASS.findall(text))))


def sample(mutants: Iterable[Mutant], count: int, seed: int) -> list[Mutant]:
    """Choose ``count`` mutants, one of each stratum in turn; the same for the same seed.

    A stratum is a package and an operator. Within it, mutants are ordered by a hash of seed and id:
    one that a release of Megatron adds or removes does not change the order of the others.
    """
    strata: dict[tuple[str, str], list[Mutant]] = defaultdict(list)
    for mutant in mutants:
        strata[mutant.operator, mutant.package].append(mutant)
    decks = [
        sorted(strata[key], key=lambda mutant: _sha256(f"{seed} {mutant.id}"))
        for key in sorted(strata)
    ]
    rounds = max(map(len, decks), default=0)
    dealt = [deck[turn] for turn in range(rounds) for deck in decks if turn < len(deck)]
    return dealt[:count]


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def introduce(mutant: Mutant) -> list[tuple[FunctionType, CodeType]]:
    """Put a mutant into this process; returns the changed function with its former code.

    Raises:
        TTraceError: when the installed Megatron has other code at this place.
    """

    def change(text: str, path: Path) -> str:
        source = Source(mutant.module, text)
        if source.between(mutant.span) != mutant.fragment:
            raise TTraceError(f"{mutant.id}: {path} is not the file in which it was found")
        return source.replace(mutant.span, mutant.replacement)

    return rewrite({mutant.module: change}, "a mutant")
