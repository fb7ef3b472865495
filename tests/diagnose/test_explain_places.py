# SPDX-License-Identifier: Apache-2.0
"""The usual places: each exists in the installed Megatron, and the likely one is named."""

import ast
import dataclasses
import importlib.util
from pathlib import Path

import pytest

from megatron_ttrace.mcore.places import PLACES, Place, usual_place
from megatron_ttrace.trace.findings import Finding
from megatron_ttrace.trace.records import Kind
from tests.diagnose.evidence_by_hand import OUTPUT, WEIGHT


def defined(file: Path) -> set[str]:
    """Functions, methods and classes of a source file."""
    kinds = ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


@pytest.mark.parametrize("place", PLACES, ids=[place.where for place in PLACES])
def test_place_exists(place: Place) -> None:
    """A place that Megatron lacks would send the reader on a wild goose chase."""
    found = importlib.util.find_spec("megatron.core")
    assert found is not None
    assert found.origin is not None
    file, _, function = place.where.partition(":")
    path = Path(found.origin).parent.parent / file
    assert path.is_file()
    assert function in defined(path)


@pytest.mark.parametrize(
    ("finding", "kind", "name", "function"),
    [
        (Finding("", "factor", "dp"), Kind.MAIN_GRAD, "", "start_grad_sync"),
        (Finding("", "factor", "cp"), Kind.MAIN_GRAD, "", "forward_step_calc_loss"),
        (
            Finding("", "partial", "tp"),
            Kind.MAIN_GRAD,
            "decoder.final_layernorm.weight",
            "_allreduce_non_tensor_model_parallel_grads",
        ),
        (Finding("", "zero"), Kind.PARAM_DELTA, "", "_get_param_groups_and_buffers"),
        (Finding("", "layers", "pp"), Kind.PARAM, "", "get_num_layers_to_build"),
        (
            Finding("", "rows"),
            Kind.GRAD_INPUT,
            "decoder.layers.0.self_attention.core_attention",
            "DotProductAttention",
        ),
    ],
)
def test_usual_place(finding: Finding, kind: Kind, name: str, function: str) -> None:
    """Cause, kind, module and axis together choose the function."""
    key = dataclasses.replace(WEIGHT, kind=kind, name=name or WEIGHT.name)
    assert usual_place(finding, key).startswith(f"{function} in megatron/core/")


def test_no_usual_place() -> None:
    """Where there is none, none is made up."""
    assert usual_place(Finding("", "rows"), dataclasses.replace(OUTPUT, name="other")) == ""
