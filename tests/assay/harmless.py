# SPDX-License-Identifier: Apache-2.0
"""Changes to a Megatron that change nothing: comments, log lines, renamed variables, reordering."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator
from pathlib import Path

PLACES = (
    *("distributed", "fusions", "models/common", "models/gpt", "optimizer", "pipeline_parallel"),
    *("tensor_parallel", "transformer"),
)
"""Folders of ``megatron/core`` with code that most jobs run."""
_RARE = {"fsdp", "experimental_attention_variant"}
"""Folders in these with code that few do."""

_PURE = (ast.Name, ast.Constant, ast.Attribute, ast.BinOp, ast.operator, ast.expr_context)


def plant(root: Path, count: int, seed: int) -> list[str]:
    """Make so many changes to functions of ``root/megatron``; returns what was done, by file.

    A function is changed once at most, and whatever has decorators is left alone.
    """
    dice = random.Random(seed)
    sites = [
        (path, function.lineno)
        for place in PLACES
        for path in sorted((root / "megatron" / "core" / place).rglob("*.py"))
        if _RARE.isdisjoint(path.parts)
        for function in _functions(path.read_text())
    ]
    dice.shuffle(sites)
    done: list[str] = []
    kinds = (_comment, _log, _rename, _swap)
    wanted = [kinds[number % len(kinds)] for number in range(count)]
    pending: dict[Path, list[tuple[int, int, list[str]]]] = {}
    for path, line in sites:
        if not wanted:
            break
        text = path.read_text()
        function = next(one for one in _functions(text) if one.lineno == line)
        for kind in dict.fromkeys(wanted):
            if (changed := kind(text.split("\n"), function, dice)) is not None:
                wanted.remove(kind)
                pending.setdefault(path, []).append(changed)
                done.append(f"{path.relative_to(root)}:{function.name}: {kind.__name__[1:]}")
                break
    for path, edits in pending.items():
        lines = path.read_text().split("\n")
        # From the end, so that lines before it keep their numbers.
        for first, last, new in sorted(edits, reverse=True):
            lines[first:last] = new
        text = "\n".join(lines)
        compile(text, str(path), "exec")
        path.write_text(text)
    return done


type _Change = tuple[int, int, list[str]] | None


def _functions(text: str) -> Iterator[ast.FunctionDef]:
    """Functions that are plain enough, with three statements at least."""
    tree = ast.parse(text)
    outer = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
    for node in (node for body in outer for node in body):
        if not isinstance(node, ast.FunctionDef) or node.decorator_list or len(node.body) < 3:
            continue
        inner = (ast.FunctionDef, ast.Lambda, ast.ClassDef, ast.Global, ast.Nonlocal, ast.Delete)
        if not any(isinstance(child, inner) for child in ast.walk(node) if child is not node):
            yield node


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
    for one, two in zip(function.body, function.body[1:], strict=False):
        pair = (one, two)
        if not all(isinstance(each, ast.Assign) and _is_pure(each) for each in pair):
            continue
        if one.end_lineno != one.lineno or two.end_lineno != two.lineno:
            continue
        if two.lineno != one.lineno + 1 or ";" in lines[one.lineno - 1] + lines[two.lineno - 1]:
            continue
        targets = [each.targets[0].id for each in pair]  # type: ignore[attr-defined]
        used = [set(re.findall(r"\w+", ast.unparse(each.value))) for each in pair]  # type: ignore[attr-defined]
        if targets[0] != targets[1] and targets[0] not in used[1] and targets[1] not in used[0]:
            at = one.lineno - 1
            return at, at + 2, [lines[at + 1], lines[at]]
    return None


def _is_pure(statement: ast.stmt) -> bool:
    assert isinstance(statement, ast.Assign)
    is_simple = len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name)
    return is_simple and all(isinstance(node, _PURE) for node in ast.walk(statement.value))
