# SPDX-License-Identifier: Apache-2.0
"""What each operator makes of a few lines of code."""

import ast
import textwrap

import pytest

from tests.assay.mutants.operators import DATA, OPERATORS, TENSOR
from tests.assay.mutants.source import Source, span_of

SHORT = {
    "DATA": DATA,
    "TENSOR": TENSOR,
    "RANKS": '__import__("torch").distributed.get_world_size()',
    "AVERAGE": '__import__("torch").distributed.ReduceOp.AVG',
}
# An operator, and below it: the body of a function -> the bodies that it can become.
CASES = r"""
drop-collective
    torch.distributed.all_reduce(x, group=g) -> None
    bucket_group.start_grad_sync() -> None
    _allreduce_word_embedding_grads(model, config) -> None
    y = reduce_from_tensor_model_parallel_region(x) -> y = (x)
    y = all_to_all(self.ep_group, x, sizes) -> y = (x)
    handle = torch.distributed.all_reduce(x, async_op=True) ->
    y = reduce(x) ->
    torch.add(x, y) ->
double-collective
    dist.all_reduce(x) -> (dist.all_reduce(x), dist.all_reduce(x))[1]
    y = _reduce(async_op=True) -> y = (_reduce(async_op=True).wait(), _reduce(async_op=True))[1]
    y = _reduce(x, g) -> y = _reduce(_reduce(x, g), g)
    dist.all_gather(parts, x) ->
    dist.broadcast(x, src=0) ->
wrong-group
    dist.all_reduce(x, group=tp_group) -> dist.all_reduce(x, group=DATA)
    dist.all_reduce(x, group=group) -> dist.all_reduce(x, group=DATA)
    y = _reduce(x, get_tensor_model_parallel_group()) -> y = _reduce(x, DATA)
    y = all_to_all(self.ep_group, x) -> y = all_to_all(TENSOR, x)
    dist.all_reduce(x) ->
    f(group=tp_group) ->
wrong-group of buffers
    dist.all_reduce(x, group=group) -> dist.all_reduce(x, group=TENSOR)
    dist.all_reduce(x, group=self.dp_cp_group) -> dist.all_reduce(x, group=TENSOR)
wrong-lookup
    g = get_group(with_context_parallel=True) -> g = get_group(with_context_parallel=False)
    g = self.pg_collection.expt_tp -> g = self.pg_collection.tp
    g = pg_collection.dp_cp -> g = pg_collection.dp
    g = self.intra_expt_dp_group -> g = self.intra_dp_cp_group
    pg_collection.dp_cp = g ->
    assert pg_collection.dp_cp is not None ->
    g = pg_collection.tp ->
    f(with_context_parallel=True) ->
    x = config.dp ->
wrong-op
    op = torch.distributed.ReduceOp.SUM -> op = torch.distributed.ReduceOp.AVG
    op = ReduceOp.AVG -> op = ReduceOp.SUM
    dist.all_reduce(x, op=dist.ReduceOp.MAX) -> dist.all_reduce(x, op=dist.ReduceOp.SUM)
    dist.all_reduce(\n    x,\n) -> dist.all_reduce(\n    x, op=AVERAGE)
    dist.all_gather(parts, x) ->
    y = _reduce(x) ->
lost-scale
    y = x / world_size -> y = (x)
    y = coeff * x -> y = (x)
    x *= factor -> pass
    g.mul_(s) -> (g)
    n = rows * size ->
    n = rows // world_size ->
    g.mul_(2) ->
double-scale
    y = x / world_size -> y = ((x / world_size) / (world_size))
    y = coeff * x -> y = ((coeff * x) * (coeff))
    x /= num_microbatches -> x /= (num_microbatches) * (num_microbatches)
    g.mul_(s) -> g.mul_(s).mul_(s)
    n = rows * size ->
lost-coefficient
    if a:\n    scale = 1 / n -> if a:\n    scale = 1.0
    if a:\n    scale = 1.0\nelse:\n    scale = x -> if a:\n    scale = 1.0\nelse:\n    scale = 1.0
    scale = f(x) if a else y -> scale = 1.0 if a else y | scale = f(x) if a else 1.0
    scale = 1 / n ->
    if a:\n    grad_scaler = f(x) ->
rank-share
    total_loss += aux -> total_loss += (aux) * RANKS
    y = torch.mean(x) -> y = torch.sum(x)
    y = x.mean(dim=0) -> y = x.sum(dim=0)
    index += 1 ->
    total_loss -= aux ->
off-by-one
    mask = ids < self.vocab_start_index -> mask = ids <= self.vocab_start_index
    if rank > last: pass -> if rank >= last: pass
    y = ids - start_index -> y = ids - (start_index + 1)
    y = offset + n -> y = (offset + 1) + n
    start_index = rank * n -> start_index = rank * n + 1
    y = x[a:b] -> y = x[(a) + 1 : (b) + 1]
    y = x[:b] ->
    if a < b: pass ->
    if rank == 0: pass ->
    size = rank * n ->
even-offset
    offset = rank * n + first_stage -> offset = (rank * n)
    if a:\n    offset -= 1 -> if a:\n    pass
    offset = rank * n ->
    size = rank * n + first ->
    for i in x:\n    offset += i ->
lost-mark
    setattr(w, 'allreduce', not expert) -> None
    w.sequence_parallel = config.sequence_parallel -> w.sequence_parallel = False
    if getattr(p, 'sequence_parallel', False): pass -> if False: pass
    expert = not getattr(p, 'allreduce', True) -> expert = not True
    w.sequence_parallel = False ->
    setattr(w, 'colour', 1) ->
    sequence_parallel = True ->
partial-mark
    x = getattr(self.weight, 'sequence_parallel', False) ->
    x = getattr(p, 'allreduce', True) ->
skip-item
    for b in self.buckets: f(b) -> for b in list(self.buckets)[1:]: f(b)
    for i in range(3): f(i) ->
stale-buffer
    a.data.copy_(b) -> None
    a.zero_() -> None
    y = a.clone() + 1 -> y = (a) + 1
    y = torch.empty(3).fill_(1) ->
    y = torch.clone(a) ->
"""


def cases():
    """Operator, module, body, and the bodies that it becomes."""
    for line in CASES.strip().splitlines():
        if not line.startswith(" "):
            operator, _, of = line.partition(" of ")
            package = "distributed" if of else "tensor_parallel"
            continue
        body, _, becomes = line.replace(r"\n", "\n").partition(" ->")
        for name, text in SHORT.items():
            becomes = becomes.replace(name, text)
        bodies = [part.strip() for part in becomes.split(" | ") if part.strip()]
        yield operator, f"megatron.core.{package}.x", body.strip(), bodies


def changes(operator: str, module: str, body: str) -> list[str]:
    """The bodies that a function with this body can become; each must be valid Python."""
    source = Source(module, "def f():\n" + textwrap.indent(body, "    ") + "\n")
    found = []
    for node in ast.walk(source.tree):
        for target, replacement in OPERATORS[operator](node, source):
            changed = source.replace(span_of(target), replacement)
            ast.parse(changed)
            found.append(textwrap.dedent(changed.split("\n", 1)[1]).strip())
    return found


@pytest.mark.parametrize(("operator", "module", "body", "becomes"), cases())
def test_changes(operator: str, module: str, body: str, becomes: list[str]) -> None:
    """As the operator's docstring says, and nothing else."""
    assert changes(operator, module, body) == becomes


def test_marks_of_one_kind() -> None:
    """Of vectors only, or of matrices only."""
    read = "getattr(p, 'sequence_parallel', False)"
    both = [f"x = ({read} if p.dim() {kind} else False)" for kind in ("> 1", "== 1")]
    assert changes("partial-mark", "megatron.core.optimizer.x", f"x = {read}") == both


def test_every_operator_has_a_case() -> None:
    """One that is added has to be listed here."""
    assert {operator for operator, *_ in cases()} == set(OPERATORS)
