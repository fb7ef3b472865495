# SPDX-License-Identifier: Apache-2.0
"""Patterns over layers and stages, made shorter with everything in them that differs."""

import ast
import itertools
import re
from collections.abc import Sequence

_MOST = 10_000
"""Layers of a pattern that is read."""
_LAYERS = re.compile(r"[\[\]()0-9,+*]+")
_REPEATED = re.compile(r"\(([^()]+)\)\*([0-9]+)|(.)\*([0-9]+)")


def layers(text: str) -> list[int] | None:
    """``([0]*3+[1]*11)`` as a list of one number per layer; ``None`` for anything else.

    Megatron evaluates these texts as Python (``moe_freq_type`` in megatron/training/arguments.py).
    """
    text = text.replace(" ", "")
    if not _LAYERS.fullmatch(text):
        return None
    try:
        return _list(ast.parse(text, mode="eval").body) or None
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        return None


def _list(node: ast.expr) -> list[int]:
    """Lists of numbers, joined and repeated. Raises ``ValueError`` for anything else."""
    match node:
        case ast.List():
            return [int(ast.literal_eval(number)) for number in node.elts]
        case ast.BinOp(op=ast.Add()):
            return _list(node.left) + _list(node.right)
        case ast.BinOp(op=ast.Mult(), right=ast.Constant(value=int(times))):
            pattern = _list(node.left)
            if len(pattern) * times <= _MOST:
                return pattern * times
    raise ValueError("not a list of numbers")


def write_layers(pattern: Sequence[int]) -> str:
    """The inverse of :func:`layers`."""
    runs = [f"[{value}]*{len(list(run))}" for value, run in itertools.groupby(pattern)]
    return f"({'+'.join(runs)})"


def kinds(pattern: Sequence[int]) -> int:
    """How many different layers there are, counted as a shorter pattern must have them."""
    return min(len(list(itertools.groupby(pattern))), 4)


def compress(pattern: Sequence[int], length: int) -> list[int]:
    """The same sequence of runs in ``length`` layers, each run as long as its share, at least one.

    Runs that do not fit any more are left out from the end.
    """
    runs = [(value, len(list(run))) for value, run in itertools.groupby(pattern)][:length]
    lengths = [1] * len(runs)
    for _ in range(length - len(runs)):
        # The run that is furthest from its share grows.
        total = sum(size for _, size in runs)
        lacking = [
            size * length / total - got for (_, size), got in zip(runs, lengths, strict=True)
        ]
        lengths[lacking.index(max(lacking))] += 1
    return [value for (value, _), got in zip(runs, lengths, strict=True) for value in [value] * got]


def stages(layout: str) -> list[str]:
    """``Et*2|(tt|)*2tL`` as one text per stage: ``Ett``, ``tt``, ``tt``, ``tL``.

    As ``PipelineParallelLayerLayout.parse_str_to_list`` reads it.
    """
    text = layout.replace(",", "").replace(" ", "")
    while match := _REPEATED.search(text):
        repeated = (match[1] or match[3]) * min(_MOST, int(match[2] or match[4]))
        text = text[: match.start()] + repeated + text[match.end() :]
    return text.split("|")


def shrink_stages(texts: Sequence[str], count: int) -> list[str]:
    """``count`` of the stages, at least two: the first, the last, and different ones between them.

    Stages with more layers than others keep having more: the numbers of decoder layers become
    1, 2, ... in their order.
    """
    middle = [*texts[1:-1]] or [texts[0].lstrip("E")]
    # One of each kind, then more of those that come first.
    order = [*dict.fromkeys(map(middle.index, middle)), *range(len(middle))]
    places = sorted([*dict.fromkeys(order)][: count - 2])
    between = itertools.islice(itertools.cycle(middle[place] for place in places), count - 2)
    chosen = [texts[0], *between, texts[-1]]
    numbers = sorted({stage.count("t") for stage in chosen if "t" in stage})
    return [
        re.sub("t+", "t" * (numbers.index(stage.count("t")) + 1), stage) if "t" in stage else stage
        for stage in chosen
    ]


def shrink_hybrid(pattern: str, count: int, first: int = 0, last: int = 0) -> str:
    """A hybrid model's layers (``M-M*|M-E``) in ``count`` pipeline segments.

    Of each segment the first of every kind of layer stays, in their order. A pattern without
    segments is repeated, so that stages are alike. What follows ``/`` (multi-token prediction) is
    treated alike. The ``first`` and ``last`` layers, at most one each, have another precision:
    segments repeat their layers until every kind is also between them.
    """
    main, *extra = pattern.split("/")
    segments = main.split("|")
    if len(segments) > 1:
        chosen = shrink_stages(segments, count) if count > 1 else ["".join(segments)]
        short = "|".join("".join(dict.fromkeys(segment)) for segment in chosen)
    else:
        short = "".join(dict.fromkeys(main)) * count
    for times in (1, 2, 3):
        repeated = "|".join(times * segment for segment in short.split("|"))
        in_order = repeated.replace("|", "")
        if {*in_order} == {*in_order[first : len(in_order) - last]}:
            break
    return "/".join([repeated, *("".join(dict.fromkeys(depth)) for depth in extra)])
