# SPDX-License-Identifier: Apache-2.0
"""Changes to a Megatron that change nothing: in comments, log lines, and in what is computed."""

import ast
import dataclasses
import itertools
import random
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

PLACES = (
    *("distributed", "fusions", "models/common", "models/gpt", "optimizer", "pipeline_parallel"),
    *("tensor_parallel", "transformer"),
)
"""Folders of ``megatron/core`` with code that most jobs run."""
_RARE = {"fsdp", "experimental_attention_variant"}
"""Folders in these with code that few do."""

_MOST = 4
"""Changes of a preferred function."""
_ATOMS = (ast.Name, ast.Attribute, ast.Constant)
_PURE = (ast.Name, ast.Constant, ast.Attribute, ast.BinOp, ast.operator, ast.expr_context)


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """A function that can be changed: its file below the root, and its qualified name."""

    file: str
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.function}"


def sites(root: Path) -> list[Site]:
    """Functions of ``root/megatron`` that are plain enough. What has decorators is left alone."""
    return [
        Site(path.relative_to(root).as_posix(), name)
        for place in PLACES
        for path in sorted((root / "megatron" / "core" / place).rglob("*.py"))
        if _RARE.isdisjoint(path.parts)
        for name, _ in _functions(path.read_text())
    ]


def plant(
    root: Path,
    count: int,
    seed: int,
    preferred: Collection[Site] = (),
    intact: Collection[str] = (),
) -> list[str]:
    """Make so many changes to functions of ``root/megatron``; returns what was done.

    Args:
        root: the folder that holds ``megatron/``.
        count: of changes.
        seed: of the choice.
        preferred: functions that get two thirds of the changes, if they are enough; those that
            get the rest.
        intact: texts that no change may touch.
    """
    dice = random.Random(seed)
    every = sites(root)
    dice.shuffle(every)
    likely, others = ([site for site in every if site in some] for some in preferred or ((), ()))
    done: list[str] = []
    for rounds, limit in (
        ([likely] * _MOST, count * 2 // 3),
        ([others, others, likely, every], count),
    ):
        for site in itertools.chain.from_iterable(rounds):
            if len(done) < limit and (kind := _change(root, site, len(done), dice, intact)):
                done.append(f"{site}: {kind}")
    return done


def _change(
    root: Path, site: Site, number: int, dice: random.Random, intact: Collection[str]
) -> str:
    """Change a function once; returns how, or nothing if it cannot be changed."""
    path = root / site.file
    text = path.read_text()
    first = number % len(_KINDS)
    for kind in (*_KINDS[first:], *_KINDS[:first]):
        function = next((node for name, node in _functions(text) if name == site.function), None)
        changed = function and kind(text.split("\n"), function, dice)
        if not changed:
            continue
        lines = text.split("\n")
        lines[changed[0] : changed[1]] = changed[2]
        new = "\n".join(lines)
        if all(new.count(part) == text.count(part) for part in intact):
            compile(new, str(path), "exec")
            path.write_text(new)
            return kind.__name__[1:]
    return ""


type _Change = tuple[int, int, list[str]] | None


def _functions(text: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions that are plain enough, with three statements at least; qualified names first."""
    tree = ast.parse(text)
    outer = [("", tree.body)]
    outer += [(f"{node.name}.", node.body) for node in tree.body if isinstance(node, ast.ClassDef)]
    for prefix, node in ((prefix, node) for prefix, body in outer for node in body):
        if not isinstance(node, ast.FunctionDef) or node.decorator_list or len(node.body) < 3:
            continue
        inner = (ast.FunctionDef, ast.Lambda, ast.ClassDef, ast.Global, ast.Nonlocal, ast.Delete)
        if not any(isinstance(child, inner) for child in ast.walk(node) if child is not node):
            yield prefix + node.name, node


def _statement(function: ast.FunctionDef, dice: random.Random) -> ast.stmt:
    return dice.choice(function.body[1:])


def _comment(lines: list[str], function: ast.FunctionDef, dice: random.Random) -> _Change:
    """A comment before a statement."""
    at = _statement(function, dice)
    return at.lineno - 1, at.lineno - 1, [" " * at.col_offset + "# As agreed in the last review."]


def _log(lines: list[str], function: ast.FunctionDef, dice: random.Random) -> _Change:
    """A line for the log before a statement."""
    at = _statement(function, dice)
    line = f'__import__("logging").getLogger(__name__).debug("here: {function.name}")'
    return at.lineno - 1, at.lineno - 1, [" " * at.col_offset + line]


def _rename(lines: list[str], function: ast.FunctionDef, dice: random.Random) -> _Change:
    """A local variable under another name, everywhere in the function."""
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    arguments = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    loops = {
        name.id
        for node in ast.walk(function)
        if isinstance(node, ast.comprehension | ast.NamedExpr | ast.ExceptHandler | ast.JoinedStr)
        for name in ast.walk(node)
        if isinstance(name, ast.Name)
    }
    stored = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    imported = {
        node.asname or node.name for node in ast.walk(function) if isinstance(node, ast.alias)
    }
    free = sorted(stored - arguments - loops - imported)
    if not free:
        return None
    name = dice.choice(free)
    first, last = function.lineno - 1, function.end_lineno or 0
    new = lines[first:last]
    spots = sorted(((n.lineno, n.col_offset) for n in names if n.id == name), reverse=True)
    for line, column in spots:
        text = new[line - 1 - first].encode()
        assert text[column:].decode().startswith(name)
        renamed = text[:column] + f"{name}_here".encode() + text[column + len(name.encode()) :]
        new[line - 1 - first] = renamed.decode()
    return first, last, new


def _swap(lines: list[str], function: ast.FunctionDef, dice: random.Random) -> _Change:
    """Two assignments that do not depend on each other, the other way round."""
    del dice
    for pair in itertools.pairwise(function.body):
        if not all(isinstance(statement, ast.Assign) and _is_pure(statement) for statement in pair):
            continue
        at = pair[0].lineno - 1
        ends = [(statement.lineno, statement.end_lineno) for statement in pair]
        if ends != [(at + 1, at + 1), (at + 2, at + 2)] or ";" in lines[at] + lines[at + 1]:
            continue
        targets = [statement.targets[0].id for statement in pair]
        used = [set(re.findall(r"\w+", ast.unparse(statement.value))) for statement in pair]
        if targets[0] != targets[1] and targets[0] not in used[1] and targets[1] not in used[0]:
            return at, at + 2, [lines[at + 1], lines[at]]
    return None


def _commute(lines: list[str], function: ast.FunctionDef, dice: random.Random) -> _Change:
    """A product with its factors the other way round."""
    products = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Mult)
        and all(isinstance(side, _ATOMS) for side in (node.left, node.right))
    ]
    return _rewritten(lines, products, dice, lambda node: (node.right, "*", node.left))


def _invert(lines: list[str], function: ast.FunctionDef, dice: random.Random) -> _Change:
    """``a is not None`` as ``not a is None``, in brackets."""
    comparisons = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Compare)
        and len(node.ops) == 1
        and isinstance(node.ops[0], ast.IsNot)
        and isinstance(node.left, _ATOMS)
    ]
    return _rewritten(lines, comparisons, dice, lambda node: (node.left, "is", node.comparators[0]))


def _compute(lines: list[str], function: ast.FunctionDef, dice: random.Random) -> _Change:
    """A local variable that nothing uses."""
    at = _statement(function, dice)
    names = [argument.arg for argument in function.args.args] or ["__name__"]
    line = f"not_used = [id({dice.choice(names)}) % {dice.randint(2, 9)}] * {dice.randint(2, 9)}"
    return at.lineno - 1, at.lineno - 1, [" " * at.col_offset + line]


def _rewritten(
    lines: list[str],
    nodes: Sequence[Any],
    dice: random.Random,
    parts: Callable[[Any], tuple[ast.expr, str, ast.expr]],
) -> _Change:
    """One of these expressions, on one line, written in another way."""
    fitting = [node for node in nodes if node.lineno == node.end_lineno]
    if not fitting:
        return None
    node = dice.choice(fitting)
    text = lines[node.lineno - 1].encode()
    left, sign, right = parts(node)
    new = f"({ast.unparse(left)} {sign} {ast.unparse(right)})"
    new = f"(not {new})" if sign == "is" else new
    changed = text[: node.col_offset] + new.encode() + text[node.end_col_offset :]
    return node.lineno - 1, node.lineno, [changed.decode()]


_KINDS = (_rename, _compute, _commute, _swap, _invert, _log, _comment)
"""Two of seven are not in the code that runs, or only in the log."""


def _is_pure(statement: ast.stmt) -> bool:
    assert isinstance(statement, ast.Assign)
    is_simple = len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name)
    return is_simple and all(isinstance(node, _PURE) for node in ast.walk(statement.value))
