# SPDX-License-Identifier: Apache-2.0
"""What releases of TransformerEngine do differently, as one table that the emulation reads.

A row says since which release something is true, and where TransformerEngine says so: the file, and
the pull request that changed it, if there was one. There are three kinds: a name that can be
imported, an argument that a function takes, and a behaviour (:class:`Change`), which the emulation
asks for by :func:`since`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from functools import wraps
from inspect import signature
from typing import Any

from megatron_ttrace.cpu.te.releases import Release, current


class Change(Enum):
    """A behaviour that another release has not; what it is stands in :data:`DIFFERENCES`."""

    CROSS_ENTROPY_UNSCALED = auto()
    CROSS_ENTROPY_BY_ROW = auto()
    CROSS_ENTROPY_MEAN_OF_COUNTED = auto()
    CROSS_ENTROPY_IN_FLOAT32 = auto()
    CONTEXT_PARALLEL_MLA_RING = auto()
    CONTEXT_PARALLEL_MLA = auto()
    PACKED_ALL_TO_ALL = auto()
    PACKED_LARGEST_LOGIT = auto()
    PACKED_SINKS = auto()
    PACKED_ALL_GATHER = auto()
    ROUTER_IN_FLOAT32 = auto()
    ROUTER_SQRTSOFTPLUS = auto()
    ROUTER_TOP1_NORMALISED = auto()
    GROUPED_UNMARKED = auto()
    GROUPED_SINGLE_BY_VARIABLE = auto()
    SINKS_START_AT_ZERO = auto()
    FP8_GATHERS_SMALL_PARTS = auto()
    PERMUTE_NEEDS_ROWS = auto()


@dataclass(frozen=True)
class Argument:
    """An argument of ``function``: ``name``, or ``Class.method``."""

    function: str
    name: str


@dataclass(frozen=True)
class Name:
    """A name in a module below ``transformer_engine``."""

    module: str
    name: str


@dataclass(frozen=True)
class Difference:
    """One row: since ``release`` this is true; ``before`` says what was.

    Attributes:
        source: a file below ``transformer_engine/``, with the pull request that changed it.
    """

    release: Release
    what: Change | Argument | Name
    says: str
    before: str
    source: str


_GROUPED = "pytorch/module/grouped_linear.py"
_CROSS_ENTROPY = "pytorch/triton/cross_entropy.py"
_CONTEXT = "pytorch/attention/dot_product_attention/context_parallel.py"
_ATTENTION = "pytorch/attention/dot_product_attention/dot_product_attention.py"
_ROUTER = "common/fused_router"
_PERMUTATION = "pytorch/permutation.py"
_RECIPE = "common/recipe/__init__.py"
_BASE = "pytorch/module/base.py"
_OPTIMIZERS = "pytorch/optimizers/__init__.py"

_BEHAVIOURS = (
    Difference(
        Release(2, 5),
        Change.CROSS_ENTROPY_UNSCALED,
        "the gradient of losses by token is not scaled",
        "it is divided by the number of tokens",
        f"{_CROSS_ENTROPY} #1879",
    ),
    Difference(
        Release(2, 5),
        Change.CONTEXT_PARALLEL_MLA_RING,
        "the ring takes values of another head size than the keys'",
        "context parallelism refuses them",
        f"{_CONTEXT} #1729",
    ),
    Difference(
        Release(2, 8),
        Change.CROSS_ENTROPY_BY_ROW,
        "each token's gradient is multiplied by that of its own loss",
        "all are multiplied by that of the first token's loss",
        f"{_CROSS_ENTROPY} #2139",
    ),
    Difference(
        Release(2, 10),
        Change.PACKED_ALL_TO_ALL,
        "all-to-all context parallelism takes packed sequences",
        "it refuses them",
        f"{_CONTEXT} #2220",
    ),
    Difference(
        Release(2, 11),
        Change.PACKED_LARGEST_LOGIT,
        "the largest logit is told for packed sequences with context parallelism",
        "no attention backend takes both",
        "pytorch/attention/dot_product_attention/utils.py #2480",
    ),
    Difference(
        Release(2, 12),
        Change.CROSS_ENTROPY_MEAN_OF_COUNTED,
        "a reduced loss is the mean over tokens that are not ignored",
        "it is the mean over all tokens",
        f"{_CROSS_ENTROPY} #2476",
    ),
    Difference(
        Release(2, 12),
        Change.PACKED_SINKS,
        "context parallelism takes attention sinks with packed sequences (with cuDNN 9.18)",
        "it refuses them",
        f"{_CONTEXT} #2568",
    ),
    Difference(
        Release(2, 13),
        Change.GROUPED_UNMARKED,
        "the grouped layer does not mark its weights; in 2.13 it does with "
        "NVTE_ALLOC_CONTIGUOUS_GROUPED_LINEAR_WEIGHTS=1, since 2.14 with single_grouped_weight",
        "it marks them tensor_model_parallel, partition_dim, partition_stride",
        f"{_GROUPED} #2654",
    ),
    Difference(
        Release(2, 13),
        Change.ROUTER_IN_FLOAT32,
        "scores are float32",
        "they are rounded to the type of the logits after each step",
        f"{_ROUTER} #2633",
    ),
    Difference(
        Release(2, 13),
        Change.ROUTER_SQRTSOFTPLUS,
        "the router's functions take sqrtsoftplus",
        "they refuse it",
        f"{_ROUTER} #2633",
    ),
    Difference(
        Release(2, 14),
        Change.ROUTER_TOP1_NORMALISED,
        "scores for the auxiliary loss are normalised with one expert per token too",
        "with one expert per token they are not",
        f"{_ROUTER}/fused_score_for_moe_aux_loss.cu #2720",
    ),
    Difference(
        Release(2, 14),
        Change.SINKS_START_AT_ZERO,
        "learnable attention sinks start at zero",
        "they start as whatever the memory holds",
        f"{_ATTENTION} #2694",
    ),
    Difference(
        Release(2, 14),
        Change.FP8_GATHERS_SMALL_PARTS,
        "with sequence parallelism, parts that are no multiple of the scaling block are gathered "
        "unrounded and then rounded",
        "they are refused (since 2.8)",
        "pytorch/distributed.py #2637",
    ),
    Difference(
        Release(2, 15),
        Change.GROUPED_SINGLE_BY_VARIABLE,
        "single_grouped_weight and single_grouped_bias have no effect without "
        "NVTE_GROUPED_LINEAR_SINGLE_PARAM=1",
        "they have",
        "pytorch/utils.py #2955",
    ),
    Difference(
        Release(2, 15),
        Change.CONTEXT_PARALLEL_MLA,
        "all-gather and all-to-all context parallelism take values of another head size too",
        "they refuse them",
        f"{_CONTEXT} #2719",
    ),
    Difference(
        Release(2, 15),
        Change.PERMUTE_NEEDS_ROWS,
        "moe_permute refuses tokens of which no row comes out",
        "it returns no rows",
        f"{_PERMUTATION} #2876",
    ),
    Difference(
        Release(2, 18),
        Change.CROSS_ENTROPY_IN_FLOAT32,
        "the gradient of the logits is rounded to their type once, at the end",
        "probabilities, their difference from the target and the product are each rounded",
        f"{_CROSS_ENTROPY} #3193",
    ),
    Difference(
        Release(2, 18),
        Change.PACKED_ALL_GATHER,
        "all-gather context parallelism takes packed sequences",
        "it refuses them",
        f"{_CONTEXT} #2829",
    ),
)


_RECIPES = "DelayedScaling Float8CurrentScaling Float8BlockScaling MXFP8BlockScaling"
_SCORE_MOD = "score_mod score_mod_bprop score_mod_tensors score_mod_bprop_tensors"
_TOPK, _SCORES = "fused_topk_with_score_function", "fused_compute_score_for_moe_aux_loss"
_FORWARD = "DotProductAttention.forward"

#: Release, source, functions, their arguments.
_ARGUMENTS = (
    ((2, 4), "pytorch/cross_entropy.py #1789", "parallel_cross_entropy", "ignore_idx"),
    ((2, 6), "pytorch/module/linear.py #1865", "Linear GroupedLinear", "save_original_input"),
    ((2, 7), "pytorch/cross_entropy.py #1997", "parallel_cross_entropy", "is_cg_capturable"),
    ((2, 8), f"{_ATTENTION} #2148", "DotProductAttention", "softmax_type"),
    ((2, 8), f"{_ATTENTION} #2012", _FORWARD, "fp8_output"),
    ((2, 8), f"{_RECIPE} #2012", "Float8CurrentScaling", "use_power_2_scales"),
    ((2, 9), f"{_ATTENTION} #2195", "DotProductAttention", "return_max_logit"),
    ((2, 10), f"{_ATTENTION} #2380", _FORWARD, "num_splits"),
    ((2, 11), f"{_GROUPED} #1953", "GroupedLinear", "name"),
    ((2, 12), f"{_ATTENTION} #2477", f"DotProductAttention {_FORWARD}", "bottom_right_diagonal"),
    ((2, 12), f"{_PERMUTATION} #1921", "moe_unpermute", "pad_offsets"),
    ((2, 14), f"{_GROUPED} #2769", "GroupedLinear", "single_grouped_weight single_grouped_bias"),
    ((2, 15), f"{_RECIPE} #2644", _RECIPES, "backward_override"),
    ((2, 16), f"{_ATTENTION} #2620", "DotProductAttention", "name"),
    ((2, 17), f"{_ATTENTION} #2984", _FORWARD, _SCORE_MOD),
    ((2, 17), "pytorch/router.py #3009", f"{_TOPK} {_SCORES}", "routing_map_format"),
    ((2, 18), "pytorch/router.py #3129", _TOPK, "topk_indices"),
    ((2, 18), f"{_GROUPED} #3161", "GroupedLinear.forward", "out dgrad_out"),
)

#: Release, source, module, names.
_NAMES = (
    ((2, 6), "pytorch/router.py #1883", "pytorch.router", f"{_TOPK} {_SCORES} fused_moe_aux_loss"),
    ((2, 8), f"{_RECIPE} #2177", "common.recipe", "NVFP4BlockScaling"),
    ((2, 8), f"{_BASE} #2043", "pytorch.module.base", "UserBufferQuantizationMode"),
    ((2, 9), f"{_RECIPE} #2256", "common.recipe", "CustomRecipe"),
    ((2, 9), "pytorch/__init__.py #2256", "pytorch", "autocast quantized_model_init"),
    ((2, 14), f"{_OPTIMIZERS} #2594", "pytorch.optimizers", "multi_tensor_scale_tensor"),
)


def _rows() -> Iterator[Difference]:
    yield from _BEHAVIOURS
    for release, source, functions, arguments in _ARGUMENTS:
        for function in functions.split():
            for name in arguments.split():
                says = f"`{function}` takes `{name}`"
                yield Difference(
                    Release(*release), Argument(function, name), says, "it does not", source
                )
    for release, source, module, names in _NAMES:
        for name in names.split():
            says = f"`transformer_engine.{module}` has `{name}`"
            yield Difference(Release(*release), Name(module, name), says, "it has not", source)


#: Every difference, by release.
DIFFERENCES = tuple(sorted(_rows(), key=lambda row: row.release))

_SINCE = {row.what: row.release for row in DIFFERENCES}


def since(change: Change) -> bool:
    """Whether the release that is emulated has ``change``."""
    return current() >= _SINCE[change]


def offers(module: str, name: str) -> bool:
    """Whether a module (``pytorch.router``) has ``name`` in the release that is emulated."""
    release = _SINCE.get(Name(module, name))
    return release is None or current() >= release


def takes(function: str, argument: str) -> bool:
    """Whether ``function`` has ``argument`` in the release that is emulated."""
    release = _SINCE.get(Argument(function, argument))
    return release is None or current() >= release


def as_released(thing: Any) -> Any:
    """Return a class or function without the arguments that the emulated release has not."""
    missing: dict[str, set[str]] = {}
    for what, release in _SINCE.items():
        if isinstance(what, Argument) and current() < release:
            owner, _, method = what.function.partition(".")
            if owner == getattr(thing, "__name__", None):
                missing.setdefault(method or "__init__", set()).add(what.name)
    if not missing:
        return thing
    if not isinstance(thing, type):
        return _without(thing, *missing.values())
    methods = {name: _without(getattr(thing, name), names) for name, names in missing.items()}
    return type(
        thing.__name__,
        (thing,),
        {**methods, "__module__": thing.__module__, "__doc__": thing.__doc__},
    )


def _without(function: Callable[..., Any], names: set[str]) -> Callable[..., Any]:
    whole = signature(function)
    left = [value for name, value in whole.parameters.items() if name not in names]
    known = whole.replace(parameters=left)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        known.bind(*args, **kwargs)
        return function(*args, **kwargs)

    call.__signature__ = known  # type: ignore[attr-defined]
    return call
