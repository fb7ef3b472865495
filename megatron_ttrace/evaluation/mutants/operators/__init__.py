# SPDX-License-Identifier: Apache-2.0
"""One kind of fault a file. An operator looks at one node and yields what could stand there.

Operators know code, not bugs: they go by the names that Megatron gives to collectives, groups,
scales, offsets and marks, and are blind to what the checker can see.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from megatron_ttrace.evaluation.mutants.operators.double_collective import double_collective
from megatron_ttrace.evaluation.mutants.operators.drop_collective import drop_collective
from megatron_ttrace.evaluation.mutants.operators.lost_mark import lost_mark
from megatron_ttrace.evaluation.mutants.operators.off_by_one import off_by_one
from megatron_ttrace.evaluation.mutants.operators.scale import double_scale, lost_scale
from megatron_ttrace.evaluation.mutants.operators.skip_item import skip_item
from megatron_ttrace.evaluation.mutants.operators.stale_buffer import stale_buffer
from megatron_ttrace.evaluation.mutants.operators.wrong_group import wrong_group
from megatron_ttrace.evaluation.mutants.operators.wrong_op import wrong_op
from megatron_ttrace.evaluation.mutants.source import Source

Operator = Callable[[ast.AST, Source], Iterator[tuple[ast.AST, str]]]
"""Yields the node to replace (that one or one inside it) and the text to put there."""

OPERATORS: dict[str, Operator] = {
    "drop-collective": drop_collective,
    "double-collective": double_collective,
    "wrong-group": wrong_group,
    "wrong-op": wrong_op,
    "lost-scale": lost_scale,
    "double-scale": double_scale,
    "off-by-one": off_by_one,
    "lost-mark": lost_mark,
    "skip-item": skip_item,
    "stale-buffer": stale_buffer,
}
