# SPDX-License-Identifier: Apache-2.0
"""What each operator makes of a few lines of code."""

import ast
import textwrap

import pytest

from tests.assay.mutants.operators import DATA, OPERATORS, TENSOR
from tests.assay.mutants.source import Source, span_of

LAYERS = "megatron.core.tensor_parallel.layers"
BUFFER = "megatron.core.distributed.param_and_grad_buffer"
RANKS = '__import__("torch").distributed.get_world_size()'
AVERAGE = '__import__("torch").distributed.ReduceOp.AVG'


def changes(operator: str, body: str, module: str = "megatron.core.optimizer.x") -> list[str]:
    """The bodies that a function with this body can become; each must be valid Python."""
    text = "def f():\n" + textwrap.indent(textwrap.dedent(body).strip(), "    ") + "\n"
    source = Source(module, text)
    found = []
    for node in ast.walk(source.tree):
        for target, replacement in OPERATORS[operator](node, source):
            changed = source.replace(span_of(target), replacement)
            ast.parse(changed)
            found.append(textwrap.dedent(changed.split("\n", 1)[1]).strip())
    return found


@pytest.mark.parametrize(
    ("operator", "body", "becomes"),
    [
        ("drop-collective", "torch.distributed.all_reduce(x, group=g)", ["None"]),
        ("drop-collective", "dist.broadcast(x, src=0)", ["None"]),
        ("drop-collective", "bucket_group.start_grad_sync()", ["None"]),
        ("drop-collective", "_allreduce_word_embedding_grads(model, config)", ["None"]),
        ("drop-collective", "y = reduce_from_tensor_model_parallel_region(x)", ["y = (x)"]),
        ("drop-collective", "y = _reduce(x, group)", ["y = (x)"]),
        ("drop-collective", "y = all_to_all(self.ep_group, x, sizes)", ["y = (x)"]),
        # Its handle is waited for: without it, the run crashes for everyone to see.
        ("drop-collective", "handle = torch.distributed.all_reduce(x, async_op=True)", []),
        ("drop-collective", "y = reduce(x)", []),
        ("drop-collective", "torch.add(x, y)", []),
        (
            "double-collective",
            "dist.all_reduce(x)",
            ["(dist.all_reduce(x), dist.all_reduce(x))[1]"],
        ),
        (
            "double-collective",
            "h = dist.all_reduce(x, async_op=True)",
            [
                "h = (dist.all_reduce(x, async_op=True).wait(), "
                "dist.all_reduce(x, async_op=True))[1]"
            ],
        ),
        ("double-collective", "y = _reduce(x, g)", ["y = _reduce(_reduce(x, g), g)"]),
        (
            "double-collective",
            "y = reduce_from_tensor_model_parallel_region(x, group=g)",
            [
                "y = reduce_from_tensor_model_parallel_region("
                "reduce_from_tensor_model_parallel_region(x, group=g), group=g)"
            ],
        ),
        # Doing these twice changes nothing.
        ("double-collective", "dist.all_gather(parts, x)", []),
        ("double-collective", "dist.broadcast(x, src=0)", []),
        (
            "wrong-op",
            "op = torch.distributed.ReduceOp.SUM",
            ["op = torch.distributed.ReduceOp.AVG"],
        ),
        ("wrong-op", "op = ReduceOp.AVG", ["op = ReduceOp.SUM"]),
        (
            "wrong-op",
            "dist.all_reduce(x, op=dist.ReduceOp.MAX)",
            ["dist.all_reduce(x, op=dist.ReduceOp.SUM)"],
        ),
        ("wrong-op", "dist.all_reduce(x, group=g)", [f"dist.all_reduce(x, group=g, op={AVERAGE})"]),
        ("wrong-op", "dist.all_reduce(\n    x,\n)", [f"dist.all_reduce(\n    x, op={AVERAGE})"]),
        ("wrong-op", "dist.all_gather(parts, x)", []),
        ("wrong-op", "y = _reduce(x)", []),
        (
            "off-by-one",
            "mask = ids < self.vocab_start_index",
            ["mask = ids <= self.vocab_start_index"],
        ),
        ("off-by-one", "mask = ids >= end_index", ["mask = ids > end_index"]),
        ("off-by-one", "if rank > last: pass", ["if rank >= last: pass"]),
        ("off-by-one", "y = ids - start_index", ["y = ids - (start_index + 1)"]),
        ("off-by-one", "y = offset + n", ["y = (offset + 1) + n"]),
        ("off-by-one", "start_index = rank * n", ["start_index = rank * n + 1"]),
        ("off-by-one", "y = x[a:b]", ["y = x[(a) + 1 : (b) + 1]"]),
        # Shapes and other numbers.
        ("off-by-one", "y = x[:b]", []),
        ("off-by-one", "if a < b: pass", []),
        ("off-by-one", "if rank == 0: pass", []),
        ("off-by-one", "size = rank * n", []),
        ("lost-mark", "setattr(w, 'sequence_parallel', config.sequence_parallel)", ["None"]),
        ("lost-mark", "setattr(w, 'allreduce', not expert)", ["None"]),
        (
            "lost-mark",
            "w.sequence_parallel = config.sequence_parallel",
            ["w.sequence_parallel = False"],
        ),
        ("lost-mark", "w.allreduce = False", ["w.allreduce = True"]),
        ("lost-mark", "if getattr(p, 'sequence_parallel', False): pass", ["if False: pass"]),
        ("lost-mark", "expert = not getattr(p, 'allreduce', True)", ["expert = not True"]),
        # No change, and no mark.
        ("lost-mark", "w.sequence_parallel = False", []),
        ("lost-mark", "setattr(w, 'colour', 1)", []),
        ("lost-mark", "sequence_parallel = True", []),
        (
            "wrong-lookup",
            "g = get_data_parallel_group(with_context_parallel=True)",
            ["g = get_data_parallel_group(with_context_parallel=False)"],
        ),
        (
            "wrong-lookup",
            "g = get_data_parallel_group(x=False, partial_data_parallel=True)",
            ["g = get_data_parallel_group(x=False, partial_data_parallel=False)"],
        ),
        ("wrong-lookup", "g = self.pg_collection.expt_tp", ["g = self.pg_collection.tp"]),
        ("wrong-lookup", "g = pg_collection.dp_cp", ["g = pg_collection.dp"]),
        ("wrong-lookup", "g = self.intra_expt_dp_group", ["g = self.intra_dp_cp_group"]),
        # It is set here, without experts there is one group only, and these are no groups.
        ("wrong-lookup", "pg_collection.dp_cp = g", []),
        ("wrong-lookup", "assert pg_collection.dp_cp is not None", []),
        ("wrong-lookup", "g = pg_collection.tp", []),
        ("wrong-lookup", "f(with_context_parallel=True)", []),
        ("wrong-lookup", "x = config.dp", []),
        ("lost-coefficient", "if a:\n    scale = 1 / n", ["if a:\n    scale = 1.0"]),
        (
            "lost-coefficient",
            "if a:\n    factor = 1.0\nelse:\n    factor = x",
            ["if a:\n    factor = 1.0\nelse:\n    factor = 1.0"],
        ),
        (
            "lost-coefficient",
            "loss_scale = f(x) if a else y",
            ["loss_scale = 1.0 if a else y", "loss_scale = f(x) if a else 1.0"],
        ),
        # On no path of its own, and no coefficient.
        ("lost-coefficient", "scale = 1 / n", []),
        ("lost-coefficient", "if a:\n    grad_scaler = f(x)", []),
        (
            "rank-share",
            "total_loss += aux",
            [f"total_loss += (aux) * {RANKS}"],
        ),
        ("rank-share", "y = torch.mean(x)", ["y = torch.sum(x)"]),
        ("rank-share", "y = x.mean(dim=0)", ["y = x.sum(dim=0)"]),
        ("rank-share", "index += 1", []),
        ("rank-share", "total_loss -= aux", []),
        ("even-offset", "offset = rank * n + first_stage", ["offset = (rank * n)"]),
        ("even-offset", "offset = a * n + first + rank * m", ["offset = (a * n) + rank * m"]),
        ("even-offset", "if a:\n    offset -= 1", ["if a:\n    pass"]),
        ("even-offset", "offset = rank * n", []),
        ("even-offset", "size = rank * n + first", []),
        ("even-offset", "for i in x:\n    offset += i", []),
        (
            "partial-mark",
            "if getattr(p, 'sequence_parallel', False): pass",
            [
                f"if (getattr(p, 'sequence_parallel', False) if p.dim() {kind} else False): pass"
                for kind in ("> 1", "== 1")
            ],
        ),
        # Not of a loop's parameter, and a mark of matrices.
        ("partial-mark", "x = getattr(self.weight, 'sequence_parallel', False)", []),
        ("partial-mark", "x = getattr(p, 'allreduce', True)", []),
        ("skip-item", "for b in self.buckets: f(b)", ["for b in list(self.buckets)[1:]: f(b)"]),
        (
            "skip-item",
            "for p, g in zip(params, grads): f(p)",
            ["for p, g in list(zip(params, grads))[1:]: f(p)"],
        ),
        ("skip-item", "for i in range(3): f(i)", []),
        ("stale-buffer", "a.data.copy_(b)", ["None"]),
        ("stale-buffer", "a.zero_()", ["None"]),
        ("stale-buffer", "a.fill_(1)", ["None"]),
        ("stale-buffer", "y = a.clone() + 1", ["y = (a) + 1"]),
        # Its result is used: nothing is left that could be meant.
        ("stale-buffer", "y = torch.empty(3).fill_(1)", []),
        ("stale-buffer", "y = torch.clone(a)", []),
    ],
)
def test_changes(operator: str, body: str, becomes: list[str]) -> None:
    """As the operator's docstring says, and nothing else."""
    assert changes(operator, body) == becomes


@pytest.mark.parametrize(
    ("body", "lost", "doubled"),
    [
        ("y = x / world_size", ["y = (x)"], ["y = ((x / world_size) / (world_size))"]),
        ("y = x * loss_scale", ["y = (x)"], ["y = ((x * loss_scale) * (loss_scale))"]),
        ("y = coeff * x", ["y = (x)"], ["y = ((coeff * x) * (coeff))"]),
        ("x *= factor", ["pass"], ["x *= (factor) * (factor)"]),
        ("x /= num_microbatches", ["pass"], ["x /= (num_microbatches) * (num_microbatches)"]),
        ("g.mul_(s)", ["(g)"], ["g.mul_(s).mul_(s)"]),
        # Not scales: numbers of elements, and a constant.
        ("n = rows * size", [], []),
        ("n = rows // world_size", [], []),
        ("g.mul_(2)", [], []),
    ],
)
def test_scales(body: str, lost: list[str], doubled: list[str]) -> None:
    """Lost and doubled."""
    assert changes("lost-scale", body) == lost
    assert changes("double-scale", body) == doubled


@pytest.mark.parametrize(
    ("module", "body", "becomes"),
    [
        (LAYERS, "dist.all_reduce(x, group=tp_group)", [f"dist.all_reduce(x, group={DATA})"]),
        (LAYERS, "dist.all_reduce(x, group=group)", [f"dist.all_reduce(x, group={DATA})"]),
        (BUFFER, "dist.all_reduce(x, group=group)", [f"dist.all_reduce(x, group={TENSOR})"]),
        (
            BUFFER,
            "dist.all_reduce(x, group=self.dp_cp_group)",
            [f"dist.all_reduce(x, group={TENSOR})"],
        ),
        (LAYERS, "y = _reduce(x, get_tensor_model_parallel_group())", [f"y = _reduce(x, {DATA})"]),
        (LAYERS, "y = all_to_all(self.ep_group, x)", [f"y = all_to_all({TENSOR}, x)"]),
        (LAYERS, "dist.all_reduce(x)", []),
        (LAYERS, "f(group=tp_group)", []),
    ],
)
def test_groups(module: str, body: str, becomes: list[str]) -> None:
    """A plain ``group`` is that of the package."""
    assert changes("wrong-group", body, module) == becomes
