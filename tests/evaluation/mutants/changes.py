# SPDX-License-Identifier: Apache-2.0
"""What an operator makes of a few lines of code."""

import ast
import textwrap

from megatron_ttrace.evaluation.mutants.operators import Operator
from megatron_ttrace.evaluation.mutants.source import Source, span_of


def changes(operator: Operator, body: str, module: str = "megatron.core.optimizer.x") -> list[str]:
    """The bodies that a function with this body can become; each must be valid Python."""
    text = "def f():\n" + textwrap.indent(textwrap.dedent(body).strip(), "    ") + "\n"
    source = Source(module, text)
    found = []
    for node in ast.walk(source.tree):
        for target, replacement in operator(node, source):
            changed = source.replace(span_of(target), replacement)
            ast.parse(changed)
            found.append(textwrap.dedent(changed.split("\n", 1)[1]).strip())
    return found
