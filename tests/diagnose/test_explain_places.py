# SPDX-License-Identifier: Apache-2.0
"""The common locations: each exists in the installed Megatron, and the likely one is named."""

import ast
import importlib.util
from pathlib import Path

import pytest

from megatron_ttrace.mcore.places import MODULES, PLACES, location
from megatron_ttrace.trace.findings import Cause, Finding
from megatron_ttrace.trace.records import STEP_LEVEL, Kind, Outcome, Verdict
from tests.diagnose.evidence_by_hand import WEIGHT


def defined(file: Path) -> set[str]:
    """Functions, methods and classes of a source file."""
    kinds = ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


WHERE = list(dict.fromkeys([*(place.where for place in PLACES), *(where for _, where in MODULES)]))


def failed(kind: Kind, name: str, outcome: Outcome = Outcome.DIVERGED) -> Verdict:
    """A failure of which only kind, name and outcome matter."""
    return Verdict(1, STEP_LEVEL, kind, name, 0, outcome, None, None, None, None, (0,), "", (1,))


@pytest.mark.parametrize("where", WHERE)
def test_place_exists(where: str) -> None:
    """A place that Megatron lacks would send the reader on a wild goose chase."""
    found = importlib.util.find_spec("megatron.core")
    assert found is not None
    assert found.origin is not None
    file, _, function = where.partition(":")
    path = Path(found.origin).parent.parent / file
    assert path.is_file()
    assert function in defined(path)


@pytest.mark.parametrize(
    ("finding", "kind", "name", "function"),
    [
        (Finding(Cause.TOO_SMALL, ("dp",)), Kind.MAIN_GRAD, "", "start_grad_sync"),
        (Finding(Cause.TOO_LARGE, ("cp",)), Kind.MAIN_GRAD, "", "forward_step_calc_loss"),
        (
            Finding(Cause.PARTIAL, ("tp",)),
            Kind.MAIN_GRAD,
            "decoder.final_layernorm.weight",
            "_allreduce_non_tensor_model_parallel_grads",
        ),
        (Finding(Cause.ZERO), Kind.PARAM_DELTA, "", "_get_param_groups_and_buffers"),
        (Finding(Cause.LAYERS, ("pp",)), Kind.PARAM, "", "get_num_layers_to_build"),
        (
            Finding(Cause.ROWS),
            Kind.GRAD_INPUT,
            "decoder.layers.0.self_attention.core_attention",
            "DotProductAttention",
        ),
    ],
)
def test_location(finding: Finding, kind: Kind, name: str, function: str) -> None:
    """Cause, kind, module and axis together choose the function."""
    found = location(failed(kind, name or WEIGHT.name), finding)
    assert found.startswith(f"{function} in megatron/core/")


@pytest.mark.parametrize(
    ("tensor", "start"),
    [
        (failed(Kind.OUTPUT, "embedding.word_embeddings"), "VocabParallelEmbedding in"),
        (failed(Kind.OUTPUT, "decoder.layers.1.mlp", Outcome.MISSING), "get_num_layers_to_build"),
        (failed(Kind.MAIN_GRAD, "decoder.layers.1.mlp"), "finalize_model_grads in"),
        (failed(Kind.PARAM_DELTA, "decoder.layers.1.mlp"), "MegatronOptimizer in"),
        (failed(Kind.TOKENS, "tokens"), "get_batch()"),
    ],
)
def test_without_a_finding(tensor: Verdict, start: str) -> None:
    """Then the code that computes such a tensor."""
    assert location(tensor).startswith(start)


def test_the_line_is_told() -> None:
    """Of the installed Megatron."""
    file, _, line = location(failed(Kind.OUTPUT, "a.mlp")).removeprefix("MLP in ").rpartition(":")
    found = importlib.util.find_spec("megatron.core")
    assert found is not None
    assert found.origin is not None
    source = (Path(found.origin).parents[2] / file).read_text(encoding="utf-8")
    assert source.splitlines()[int(line) - 1].startswith("class MLP")


def test_no_location() -> None:
    """Where there is none, none is made up."""
    assert location(failed(Kind.OUTPUT, "other"), Finding(Cause.ROWS)) == ""
    assert location(failed(Kind.OUTPUT, "other")) == ""
