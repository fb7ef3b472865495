# SPDX-License-Identifier: Apache-2.0
"""The difference between two versions of a tree of Python files, as hunks that can be left out.

Pure: from texts to texts. A hunk has no context lines, and equally long replaced blocks are divided
into lines. Hunks that make sense only together are grouped (:func:`groups`).
"""

import ast
import builtins
import dataclasses
import difflib
import functools
import io
import re
import symtable
import tokenize
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from megatron_ttrace.trace import changes

Texts = Mapping[str, str]
"""Path below the tree -> content."""

_NAME = re.compile(r"[^\W\d]\w*")
_LEAST_MOVED = 8
"""Characters of a line that is recognised where it was moved to; brackets are everywhere."""
_IGNORED = frozenset({tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER})

_OF_MODULES = frozenset({"__file__", "__name__", "__path__", "__annotations__"})


@dataclasses.dataclass(frozen=True, slots=True)
class Splice:
    """A hunk: lines of the good file, and what the bad file has in their place.

    Attributes:
        file: path below the tree.
        start: of the good file's lines, from 0.
        line: of the bad file, from 1, where the added lines begin, or those after the removed ones.
        function: qualified name of the function that it is in; empty outside of functions.
        is_code: whether it has more than comments and blank lines.
        is_whole: whether it is a whole file, which the other version lacks.
    """

    file: str
    start: int
    removed: tuple[str, ...]
    added: tuple[str, ...]
    line: int
    function: str = ""
    is_code: bool = True
    is_whole: bool = False


def difference(good: Texts, bad: Texts) -> list[Splice]:
    """All hunks, by file and line."""
    files = sorted({*good, *bad})
    return [
        splice
        for file in files
        if good.get(file) != bad.get(file)
        for splice in _of_file(file, good.get(file), bad.get(file))
    ]


def applied(good: Texts, splices: Iterable[Splice]) -> dict[str, str | None]:
    """The files of these hunks with only them applied to the good version; ``None``: no file."""
    by_file: dict[str, list[Splice]] = defaultdict(list)
    for splice in splices:
        by_file[splice.file].append(splice)
    return {file: _text(good.get(file), hunks) for file, hunks in by_file.items()}


def _text(good: str | None, splices: Sequence[Splice]) -> str | None:
    if splices[0].is_whole:
        return "".join(splices[0].added) if good is None else None
    lines, pieces, at = _lines(good or ""), [], 0
    for splice in sorted(splices, key=lambda splice: (splice.start, splice.line)):
        pieces += [*lines[at : splice.start], *splice.added]
        at = splice.start + len(splice.removed)
    return "".join([*pieces, *lines[at:]])


def _of_file(file: str, good: str | None, bad: str | None) -> Iterator[Splice]:
    old, new = _lines(good or ""), _lines(bad or "")
    if good is None or bad is None:
        yield Splice(file, 0, tuple(old), tuple(new), 1, is_whole=True)
        return
    comments = _comments(good), _comments(bad)
    for start, end, first, last in _blocks(old, new):
        # Where nothing was added, the function is that of the removed lines.
        name = _function(bad, first + 1) if first < last else _function(good, start + 1)
        is_code = not (
            comments[0].issuperset(range(start + 1, end + 1))
            and comments[1].issuperset(range(first + 1, last + 1))
        )
        yield Splice(
            file=file,
            start=start,
            removed=tuple(old[start:end]),
            added=tuple(new[first:last]),
            line=max(1, min(first + 1, len(new))),
            function=name,
            is_code=is_code,
        )


def _blocks(old: Sequence[str], new: Sequence[str]) -> Iterator[tuple[int, int, int, int]]:
    """Ranges of lines that differ: begin and end in the old file, then in the new one."""
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for tag, start, end, first, last in matcher.get_opcodes():
        if tag == "replace" and end - start == last - first:
            for number in range(end - start):
                yield start + number, start + number + 1, first + number, first + number + 1
        elif tag != "equal":
            yield start, end, first, last


def broken(changed: Mapping[str, str | None], good: Texts, bad: Texts) -> str:
    """Why a combination of hunks cannot run; empty if it may. This costs no check.

    It does not compile; or it uses a name, or imports one from another file that differs, which is
    bound in neither, though it is in the good or the bad version. ``changed`` are the files of the
    combination that are not as in the good version (``applied``).
    """
    texts = {file: changed.get(file, good.get(file)) for file in {*good, *bad}}
    for file, text in changed.items():
        if text is not None and not _names(text).compiles:
            return f"{file} would not compile"
    for file, text in changed.items():
        names = _names(text or "")
        known = [_names(version.get(file, "")) for version in (good, bad)]
        for name in sorted(names.missing - known[0].missing - known[1].missing):
            return f"{file} would use {name}, which is not defined"
        for module, name in sorted(names.imported):
            ends = (f"{module}.py", f"{module}/__init__.py")
            for other in sorted(path for path in texts if f"/{path}".endswith(ends)):
                versions = (_names(version.get(other, "")) for version in (good, bad))
                is_bound = texts[other] is not None and name in _names(texts[other] or "").bound
                if not is_bound and any(name in version.bound for version in versions):
                    return f"{file} would import {name} from {other}, which lacks it"
    return ""


@dataclasses.dataclass(frozen=True, slots=True)
class _Names:
    """What is known of a file; nothing if it does not compile.

    Attributes:
        bound: names at its top.
        missing: names that it uses and does not bind; none if it imports all of another file.
        imported: names from other files, after the path of their module, which begins with ``/``.
        shared: what it defines for others: functions, classes, parameters, attributes, and what is
            bound outside of functions.
        local: what each of its outermost functions binds, by qualified name.
        statements: first and last lines of simple statements and of headers that have several.
    """

    bound: frozenset[str] = frozenset()
    missing: frozenset[str] = frozenset()
    imported: frozenset[tuple[str, str]] = frozenset()
    shared: frozenset[str] = frozenset()
    local: Mapping[str, set[str]] = dataclasses.field(default_factory=dict)
    statements: tuple[tuple[int, int], ...] = ()
    compiles: bool = True


@functools.lru_cache(maxsize=4096)  # both versions of all files between two releases
def _names(text: str) -> _Names:
    try:
        with warnings.catch_warnings(action="ignore"):
            compile(text, "", "exec", dont_inherit=True)
            tree, top = ast.parse(text), symtable.symtable(text, "", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return _Names(compiles=False)
    nodes = list(ast.walk(tree))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    attributes = (node for node in nodes if isinstance(node, ast.Attribute))
    shared = {node.attr for node in attributes if isinstance(node.ctx, ast.Store)}
    bound, used = set(vars(builtins)) | _OF_MODULES, set[str]()
    local: dict[str, set[str]] = defaultdict(set)
    for function, table in _scopes(top, ""):
        is_function = table.get_type() == "function"
        for symbol in table.get_symbols():
            name = symbol.get_name()
            is_outer = table is top or symbol.is_global()
            is_bound = symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
            if is_outer and is_bound:
                bound.add(name)
            elif is_outer and symbol.is_referenced():
                used.add(name)
            if is_function and (is_bound or symbol.is_parameter()):
                local[function].add(name)
            is_argument = symbol.is_parameter() and table.get_name() != "lambda"
            if is_argument or symbol.is_namespace() or (is_bound and not is_function):
                shared.add(name)
    has_star = any(alias.name == "*" for node in imports for alias in node.names)
    return _Names(
        bound=frozenset(bound),
        missing=frozenset() if has_star else frozenset(used - bound),
        imported=frozenset(
            (f"/{node.module.replace('.', '/')}", alias.name)
            for node in imports
            for alias in node.names
            if node.module
        ),
        shared=frozenset(shared),
        local=local,
        statements=tuple(_statements(nodes)),
    )


def _scopes(
    table: symtable.SymbolTable, prefix: str, function: str = ""
) -> Iterator[tuple[str, symtable.SymbolTable]]:
    """A table of names and all within, each with the outermost function that it is in."""
    yield function, table
    for inner in table.get_children():
        name = f"{prefix}{inner.get_name()}"
        if inner.get_type() == "function":
            yield from _scopes(inner, "", function or name)
        else:
            is_class = inner.get_type() == "class"
            yield from _scopes(inner, f"{name}." if is_class else prefix, function)


def _statements(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, int]]:
    for node in nodes:
        if not isinstance(node, ast.stmt):
            continue
        body = getattr(node, "body", None)
        last = body[0].lineno - 1 if body and isinstance(body, list) else node.end_lineno
        if last and last > node.lineno:
            yield node.lineno, last


def groups(splices: Sequence[Splice], good: Texts, bad: Texts) -> list[tuple[int, ...]]:
    """Numbers of hunks that depend on each other, the groups by their first hunk.

    Together stay hunks of a statement; of lines that were moved within a file; and those that
    mention a name that only one version binds: a new function, parameter or import and its uses, a
    renamed variable.
    """
    by_file: dict[str, list[tuple[int, Splice]]] = defaultdict(list)
    for number, splice in enumerate(splices):
        by_file[splice.file].append((number, splice))
    together: list[list[int]] = []
    for file, numbered in by_file.items():
        old, new = _names(good.get(file, "")), _names(bad.get(file, ""))
        together += _of_statements(numbered, old, new)
        together += _of_moved_lines(numbered)
        for function in {splice.function for _, splice in numbered} - {""}:
            inside = [pair for pair in numbered if pair[1].function == function]
            names = old.local.get(function, set()) ^ new.local.get(function, set())
            together += _of_names(inside, names)
    together += _of_names(
        list(enumerate(splices)), _shared_names(good, by_file) ^ _shared_names(bad, by_file)
    )
    sets = [{number} for number in range(len(splices))]
    for numbers in together:
        union = set[int]().union(*(sets[number] for number in numbers))
        for number in union:
            sets[number] = union
    return sorted({tuple(sorted(numbers)) for numbers in sets})


type _Numbered = Sequence[tuple[int, Splice]]


def _of_statements(numbered: _Numbered, good: _Names, bad: _Names) -> Iterator[list[int]]:
    """Hunks in one simple statement, or in one header of a compound one, of either version."""
    for spans, is_old in ((good.statements, True), (bad.statements, False)):
        by_span: dict[tuple[int, int], list[int]] = defaultdict(list)
        for number, splice in numbered:
            first = splice.start + 1 if is_old else splice.line
            count = len(splice.removed if is_old else splice.added)
            for span in spans:
                if first <= span[1] and first + count - 1 >= span[0]:
                    by_span[span].append(number)
        yield from by_span.values()


def _of_moved_lines(numbered: _Numbered) -> Iterator[list[int]]:
    """Hunks of a line that is removed in one and added in another."""
    removed: dict[str, list[int]] = defaultdict(list)
    added: dict[str, list[int]] = defaultdict(list)
    for number, splice in numbered:
        for lines, by_line in ((splice.removed, removed), (splice.added, added)):
            for line in lines:
                if len(line.strip()) >= _LEAST_MOVED and not line.lstrip().startswith("#"):
                    by_line[line.strip()].append(number)
    for line, numbers in removed.items():
        if line in added:
            yield [*numbers, *added[line]]


def _of_names(numbered: _Numbered, names: Collection[str]) -> Iterable[list[int]]:
    by_name: dict[str, list[int]] = defaultdict(list)
    for number, splice in numbered:
        text = "".join((*splice.removed, *splice.added))
        for name in {*_NAME.findall(text)}.intersection(names):
            by_name[name].append(number)
    return by_name.values()


def _shared_names(texts: Texts, files: Iterable[str]) -> set[str]:
    """What files define for others, and their own names."""
    present = [file for file in files if file in texts]
    stems = {file.rpartition("/")[2].removesuffix(".py") for file in present}
    return stems.union(*(_names(texts[file]).shared for file in present))


@functools.lru_cache(maxsize=2)
def _functions(text: str) -> list[tuple[int, int, str]]:
    """First and last lines and names of the outermost functions of a file."""
    functions = changes.read(text.encode(errors="surrogatepass")).functions
    return [(*span, name) for name, function in functions.items() for span in function.spans]


def _function(text: str, line: int) -> str:
    """The outermost function that a line is in; empty outside of functions."""
    return next((name for a, b, name in _functions(text) if a <= line <= b), "")


def _comments(text: str) -> set[int]:
    """Numbers of lines with nothing but comments; and of blank ones, outside of texts."""
    codes: set[int] = set()
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type not in _IGNORED | {tokenize.INDENT, tokenize.DEDENT}:
                codes.update(range(token.start[0], token.end[0] + 1))
    except (tokenize.TokenError, SyntaxError, ValueError):
        return set()
    return set(range(1, text.count("\n") + 2)) - codes


def _lines(text: str) -> list[str]:
    """With their ends; as Python counts, which knows fewer ends than ``str.splitlines``."""
    return list(io.StringIO(text))
