# SPDX-License-Identifier: Apache-2.0
"""The operators: each recognises code by Megatron's names and says what to replace it by.

An operator yields the nodes to replace, which are the given one or inside it, with the new text.
"""

import ast
import re
from collections.abc import Callable, Iterator
from typing import TypeGuard

from tests.assay.mutants.source import Source, last_name

Changes = Iterator[tuple[ast.AST, str]]
Operator = Callable[[ast.AST, Source], Changes]

_COLLECTIVE = re.compile(
    r"(^|_)(all_?reduce|all_?gather|reduce_scatter|all_to_all|all2all|broadcast"
    r"|gather_along|reduce_scatter_along|split_along|(grad|param)_sync)(_|$)"
    r"|^(copy_to|reduce_from|gather_from|scatter_to|reduce_scatter_to)\w*_region$|^_reduce$"
)
_SUM = re.compile(r"all_?reduce|^_reduce$|^reduce_from")
_IN_PLACE = re.compile(r"(^|\.)(torch\.distributed|dist)\.\w+$|^dist_\w+_func$")


def _is_collective(node: ast.AST) -> TypeGuard[ast.Call]:
    """Whether a node calls a collective, or what Megatron has around one."""
    return isinstance(node, ast.Call) and bool(_COLLECTIVE.search(last_name(node.func)))


def _returns_new(call: ast.Call) -> bool:
    """Whether the call takes a tensor and returns another; torch's own collectives fill buffers."""
    return bool(call.args) and not _IN_PLACE.search(ast.unparse(call.func))


def _tensor_of(call: ast.Call) -> ast.expr | None:
    """The argument that becomes the result of such a call; all-to-alls take the group first."""
    for argument in call.args:
        if not isinstance(argument, ast.Starred) and not _is_group(argument):
            return argument
    return None


def _is_group(node: ast.AST) -> bool:
    """Whether an expression is a process group, by its name."""
    if isinstance(node, ast.Call):
        return bool(re.match(r"get_\w*group$", last_name(node.func)))
    return bool(re.search(r"(^|_)(group|pg)$", last_name(node)))


def drop_collective(node: ast.AST, source: Source) -> Changes:
    """``all_reduce(x)`` becomes nothing, ``y = reduce_from_region(x)`` becomes ``y = x``."""
    if not _is_collective(node):
        return
    if source.is_statement(node):
        yield node, "None"
    elif _returns_new(node):
        tensor = _tensor_of(node)
        if tensor is not None:
            yield node, f"({source.of(tensor)})"


def double_collective(node: ast.AST, source: Source) -> Changes:
    """``all_reduce(x)`` twice in a row; ``reduce_from_region(x)`` of its own result.

    Only collectives that sum: gathering twice is gathering once.
    """
    if not _is_collective(node) or not _SUM.search(last_name(node.func)):
        return
    text = source.of(node)
    if any(word.arg == "async_op" and _is_true(word.value) for word in node.keywords):
        # Two at once on one tensor would race, and the fault would come and go.
        yield node, f"({text}.wait(), {text})[1]"
    elif source.is_statement(node) or not _returns_new(node):
        yield node, f"({text}, {text})[1]"
    else:
        tensor = _tensor_of(node)
        if tensor is not None:
            head, _, tail = text.partition(source.of(tensor))
            yield node, f"{head}{text}{tail}"


def _is_true(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


_STATE = '__import__("megatron.core.parallel_state", fromlist=["parallel_state"])'
TENSOR = f"{_STATE}.get_tensor_model_parallel_group()"
DATA = f"{_STATE}.get_data_parallel_group()"
_NOT_TENSOR = re.compile(r"dp|data_parallel|cp|context|ep\b|ep_|expert|bucket|optimizer")
_TENSOR = re.compile(r"tp|tensor|model_parallel|pp|pipeline|embd|embedding")


def wrong_group(node: ast.AST, source: Source) -> Changes:
    """The data-parallel group for the tensor-parallel one, the tensor-parallel one for others."""
    if _is_collective(node):
        for argument in [*node.args, *(word.value for word in node.keywords)]:
            if _is_group(argument):
                yield argument, _other_group(source.of(argument), source.module)


def _other_group(group: str, module: str) -> str:
    if _NOT_TENSOR.search(group):
        return TENSOR
    if _TENSOR.search(group):
        return DATA
    # A plain "group" is that of the package.
    return TENSOR if re.search(r"\.(distributed|optimizer)\.", module) else DATA


_COLLECTION = re.compile(r"(^|_)(pg_collection|pgs)$|^process_groups?$")
_OTHER_GROUP = {
    "expt_tp": "tp",
    "dp_cp": "dp",
    "tp_cp": "tp",
    "tp_dp_cp": "dp_cp",
    "tp_ep": "ep",
    "mp": "tp_ep_pp",
    "intra_dp_cp": "dp_cp",
    "intra_expt_dp": "expt_dp",
    "expt_dp": "dp_cp",
}
_OTHER_GROUP |= {"dp": "dp_cp", "ep": "tp_ep", "tp_ep_pp": "mp"}
"""Expert groups for dense ones and the reverse; an axis is left out, or one too many is in."""
_WIDTH = re.compile(r"^(with_context_parallel|partial_\w*data_parallel)$")


def wrong_lookup(node: ast.AST, source: Source) -> Changes:
    """Another group is looked up: without an axis, or that of dense layers for experts."""
    if isinstance(node, ast.Call) and re.match(r"get_\w*group$", last_name(node.func)):
        for word in node.keywords:
            if _WIDTH.search(word.arg or "") and _is_true(word.value):
                yield word.value, "False"
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        if isinstance(source.statement(node), ast.Assert):
            return
        other = _OTHER_GROUP.get(node.attr)
        if node.attr == "tp" and ".moe." in source.module:
            other = "expt_tp"  # the same group as tp in models without experts
        if other and _COLLECTION.search(last_name(node.value)):
            yield node, f"{source.of(node.value)}.{other}"
        elif last_name(node.value) == "self" and node.attr.endswith("expt_dp_group"):
            yield node, f"self.{node.attr.replace('expt_dp_group', 'dp_cp_group')}"


_OTHER_OP = {"SUM": "AVG", "AVG": "SUM", "MAX": "SUM", "MIN": "MAX"}
_AVERAGE = '__import__("torch").distributed.ReduceOp.AVG'


def wrong_op(node: ast.AST, source: Source) -> Changes:
    """Another ``ReduceOp``; the average where none is given and torch would sum."""
    if isinstance(node, ast.Attribute) and last_name(node.value) == "ReduceOp":
        if node.attr in _OTHER_OP:
            yield node, f"{source.of(node.value)}.{_OTHER_OP[node.attr]}"
    elif _is_collective(node) and _sums_by_default(node):
        text = source.of(node)
        head = text[: text.rindex(")")].rstrip().rstrip(",")
        yield node, f"{head}, op={_AVERAGE})"


def _sums_by_default(call: ast.Call) -> bool:
    torchs = ast.unparse(call.func).endswith(("distributed.all_reduce", "dist.all_reduce"))
    return torchs and len(call.args) < 2 and all(word.arg != "op" for word in call.keywords)


_FACTOR = re.compile(r"scal|factor|coeff|num_microbatches|num_tokens")
_COUNT = re.compile(r"world_size|_size\b|\.size\(|num_|total|degree|\bn\b")
_METHODS = {"mul": "*", "mul_": "*", "div": "/", "div_": "/"}


def lost_scale(node: ast.AST, source: Source) -> Changes:
    """``x / n`` becomes ``x``, ``x *= s`` nothing, ``x.mul_(s)`` becomes ``x``."""
    for whole, without, _ in _scalings(node, source):
        yield whole, without


def double_scale(node: ast.AST, source: Source) -> Changes:
    """``x / n`` becomes ``x / n / n``, ``x *= s`` becomes ``x *= s * s``."""
    for whole, _, twice in _scalings(node, source):
        yield whole, twice


def _scalings(node: ast.AST, source: Source) -> Iterator[tuple[ast.AST, str, str]]:
    """What scales, the text without the scale, and the text with it twice."""
    if isinstance(node, ast.BinOp):
        yield from _product(node, source)
    elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Mult | ast.Div):
        factor = source.of(node.value)
        if _is_scale(factor, node.op):
            sign = "*" if isinstance(node.op, ast.Mult) else "/"
            yield node, "pass", f"{source.of(node.target)} {sign}= ({factor}) * ({factor})"
    elif isinstance(node, ast.Call) and last_name(node.func) in _METHODS and len(node.args) == 1:
        assert isinstance(node.func, ast.Attribute | ast.Name)
        factor = source.of(node.args[0])
        if isinstance(node.func, ast.Attribute) and re.search(r"[a-z]", factor):
            call = f".{node.func.attr}({factor})"
            yield node, f"({source.of(node.func.value)})", f"{source.of(node)}{call}"


def _product(node: ast.BinOp, source: Source) -> Iterator[tuple[ast.AST, str, str]]:
    left, right = source.of(node.left), source.of(node.right)
    if isinstance(node.op, ast.Div) and _is_scale(right, node.op):
        yield node, f"({left})", f"(({source.of(node)}) / ({right}))"
    elif isinstance(node.op, ast.Mult):
        if _is_scale(right, node.op):
            yield node, f"({left})", f"(({source.of(node)}) * ({right}))"
        elif _is_scale(left, node.op):
            yield node, f"({right})", f"(({source.of(node)}) * ({left}))"


def _is_scale(text: str, op: ast.operator) -> bool:
    # Products of counts are sizes; a division by a count is a mean.
    return bool(_FACTOR.search(text) or (isinstance(op, ast.Div) and _COUNT.search(text)))


_COEFFICIENT = re.compile(r"(scale|scaling|factor|coeff)$|^scal(e|ing)_")


def lost_coefficient(node: ast.AST, source: Source) -> Changes:
    """A coefficient is 1 on one path: in one branch of an ``if``."""
    if not isinstance(node, ast.Assign) or not _COEFFICIENT.search(last_name(node.targets[0])):
        return
    branches = [node.value] if isinstance(source.parent(node), ast.If) else []
    if isinstance(node.value, ast.IfExp):
        branches = [node.value.body, node.value.orelse]
    for value in branches:
        if not isinstance(value, ast.Constant):
            yield value, "1.0"


_ADDEND = re.compile(r"loss|grad|norm|tokens")
_RANKS = '__import__("torch").distributed.get_world_size()'


def rank_share(node: ast.AST, source: Source) -> Changes:
    """An addend counts once per rank (``x += y`` becomes ``x += y * ranks``); a sum, not a mean."""
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
        if _ADDEND.search(last_name(node.target)) or _ADDEND.search(last_name(node.value)):
            yield node.value, f"({source.of(node.value)}) * {_RANKS}"
    elif isinstance(node, ast.Attribute) and node.attr == "mean":
        yield node, f"{source.of(node.value)}.sum"


_POSITION = re.compile(
    r"start|(^|_)end($|_)|offset|(^|_)(index|idx|rank|first|last|begin|mask|boundary|stage)($|_)"
)
_STRICT = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}


def off_by_one(node: ast.AST, source: Source) -> Changes:
    """``<`` for ``<=``, an offset or a slice that is one too large."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        sign = _STRICT.get(type(node.ops[0]))
        sides = [node.left, node.comparators[0]]
        if sign and any(_POSITION.search(last_name(side)) for side in sides):
            yield node, f"{source.of(sides[0])} {sign} {source.of(sides[1])}"
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        for side in (node.right, node.left):
            if _POSITION.search(last_name(side)):
                yield side, f"({source.of(side)} + 1)"
                return
    elif isinstance(node, ast.Assign) and len(node.targets) == 1:
        is_product = isinstance(node.value, ast.BinOp) and isinstance(
            node.value.op, ast.Mult | ast.FloorDiv
        )
        if is_product and _POSITION.search(last_name(node.targets[0])):
            yield node.value, f"{source.of(node.value)} + 1"
    elif isinstance(node, ast.Slice) and node.lower and node.upper and not node.step:
        yield node, f"({source.of(node.lower)}) + 1 : ({source.of(node.upper)}) + 1"


_UNEVEN = re.compile(r"first|last|remainder|extra|stage")


def even_offset(node: ast.AST, source: Source) -> Changes:
    """An offset as if all pipeline stages had the same number of layers."""
    statement = source.statement(node)
    if not isinstance(statement, ast.Assign | ast.AugAssign):
        return
    target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
    if "offset" not in last_name(target):
        return
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        if _UNEVEN.search(last_name(node.right)):
            yield node, f"({source.of(node.left)})"
    elif isinstance(node, ast.AugAssign) and isinstance(source.parent(node), ast.If):
        yield node, "pass"


MARKS = {
    "allreduce": "True",
    "average_gradients_across_tp_domain": "False",
    "is_embedding_or_output_parameter": "False",
    "sequence_parallel": "False",
    "shared": "False",
    "shared_embedding": "False",
    "tensor_model_parallel": "False",
}
"""Attributes by which Megatron's code knows how a tensor is divided, and the value if not set."""


def lost_mark(node: ast.AST, source: Source) -> Changes:
    """A mark is not set (no ``setattr``, or the default is assigned), or not read."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 3:
        mark = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
        if mark in MARKS and node.func.id == "setattr":
            yield node, "None"
        elif mark in MARKS and node.func.id == "getattr":
            yield node, MARKS[str(mark)]
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
        default = MARKS.get(node.targets[0].attr)
        if default and source.of(node.value) != default:
            yield node.value, default


_BOTH_KINDS = ("sequence_parallel", "tensor_model_parallel", "average_gradients_across_tp_domain")
"""Marks of vectors (norms, biases) and of matrices; all others are of matrices only."""


def partial_mark(node: ast.AST, source: Source) -> Changes:
    """A mark of a parameter is not read on vectors, or on vectors only."""
    if isinstance(node, ast.Call) and last_name(node.func) == "getattr" and len(node.args) == 3:
        holder, mark = node.args[0], node.args[1]
        known = isinstance(mark, ast.Constant) and mark.value in _BOTH_KINDS
        for kind in ("> 1", "== 1") if known and isinstance(holder, ast.Name) else ():
            read = f"{source.of(node)} if {source.of(holder)}.dim() {kind}"
            yield node, f"({read} else {MARKS[ast.literal_eval(mark)]})"


_ITEMS = re.compile(r"bucket|buffer|grad|param|group|chunk|microbatch")


def skip_item(node: ast.AST, source: Source) -> Changes:
    """``for bucket in buckets`` goes through all but the first."""
    if isinstance(node, ast.For) and _ITEMS.search(source.of(node.iter)):
        yield node.iter, f"list({source.of(node.iter)})[1:]"


_FILLS = {"copy_", "zero_", "fill_"}


def stale_buffer(node: ast.AST, source: Source) -> Changes:
    """``a.copy_(b)``, ``a.zero_()`` and ``a.fill_(0)`` do nothing, ``a.clone()`` is ``a``.

    A lost ``wait()`` is left out: its effect depends on timing, so it says nothing about a checker.
    """
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return
    if last_name(node.func) in _FILLS and source.is_statement(node):
        yield node, "None"
    elif last_name(node.func) == "clone" and not node.args:
        yield node, f"({source.of(node.func.value)})"


OPERATORS: dict[str, Operator] = {
    function.__name__.replace("_", "-"): function
    for function in (
        *(drop_collective, double_collective, wrong_group, wrong_lookup, wrong_op),
        *(lost_scale, double_scale, lost_coefficient, rank_share, off_by_one, even_offset),
        *(lost_mark, partial_mark, skip_item, stale_buffer),
    )
}
"""By the name that an id has."""
