# SPDX-License-Identifier: Apache-2.0
"""Megatron's functions that take elements of all parameters; its optimizers and buckets."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import torch

from megatron_ttrace.mcore.imported import users_globals
from megatron_ttrace.trace.counted import Statistic

type Wrap = Callable[..., Any]
"""Is called with a function, and the arguments of a call of it."""

WATCHED = MappingProxyType(
    {
        "get_grad_norm_fp32": Statistic.GRAD_NORM,
        "count_zeros_fp32": Statistic.NUM_ZEROS,
    }
)
"""Functions of megatron/core/optimizer/clip_grads.py, by name."""
CLIP = "clip_grad_by_total_norm_fp32"
"""Another one, which returns nothing."""

REDUCE_SCATTER = "dist_reduce_scatter_func"
"""What buckets are reduced by with ZeRO, a global of the module that defines them."""

KERNELS = "multi_tensor_applier"
"""What these functions call kernels through that PyTorch's dispatcher does not see."""

_HYPERPARAMETERS = (
    *("lr", "max_lr", "min_lr", "lr_mult", "is_decoupled_lr", "weight_decay", "wd_mult"),
    *("betas", "eps", "momentum", "nesterov"),
)
"""What a parameter group says of how its parameters are updated; the rest is bookkeeping."""

_FOLLOWING = ("lr", "weight_decay", "step")
"""What Megatron's schedule sets (``OptimizerParamScheduler.step``), and the steps made so far."""

_MARKS = (("expert", "is_expert_parallel"), ("decoupled", "is_decoupled_lr"))

LAYER_WISE = "LayerWiseDistributedOptimizer"
"""Of megatron/core/optimizer/layer_wise_optimizer.py: it gives whole parameters to ranks."""

_PLAIN = (
    *("FP32Optimizer", "Float16OptimizerWithFloat16Params", "DistributedOptimizer"),
    "FullyShardedOptimizer",
)


class Globals:
    """Those of a module, which may be registered no longer, as attributes."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.__dict__ = names


def users(wraps: Mapping[str, Wrap]) -> Iterator[tuple[Any, str, Wrap]]:
    """What has globals of these names: each module of Megatron's imported them for itself.

    Also the modules of the user's functions that replace others there.
    """
    owners: dict[int, dict[str, Any]] = {}
    for at, module in [*sys.modules.items()]:
        is_megatrons = at.startswith("megatron.") and isinstance(module, ModuleType)
        if is_megatrons and any(callable(vars(module).get(name)) for name in wraps):
            owners |= {id(names): names for names in (vars(module), *users_globals(module))}
    for name, wrap in wraps.items():
        once = _outermost(wrap)
        for names in owners.values():
            if callable(names.get(name)):
                yield Globals(names), name, once


def _outermost(wrap: Wrap) -> Wrap:
    """Not for calls inside of another: what replaces a function may call that one."""
    inside = False

    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside:
            return original(*args, **kwargs)
        inside = True
        try:
            return wrap(original, *args, **kwargs)
        finally:
            inside = False

    return call


def whole(value: Any) -> Any:
    """What a fork passes to be clipped: as a list, if it could be read only once."""
    return list(value) if isinstance(value, Iterator) else value


def unknown_kind(optimizer: Any) -> str:
    """The class of the first optimizer whose division among ranks is not known, or nothing."""
    if type(optimizer).__name__ in ("ChainedOptimizer", LAYER_WISE):
        return next(filter(None, map(unknown_kind, optimizer.chained_optimizers)), "")
    return "" if type(optimizer).__name__ in _PLAIN else type(optimizer).__name__


class LayerWise(NamedTuple):
    """The process groups among whose ranks parameters are divided as wholes.

    ``None`` where each rank has all.
    """

    common: Any
    experts: Any


def leaves_and_groups(
    optimizer: Any, groups: LayerWise | None = None
) -> Iterator[tuple[Any, LayerWise | None]]:
    """The optimizers in a (nested) ``ChainedOptimizer``, with the groups of a layer-wise one."""
    if type(optimizer).__name__ == LAYER_WISE:
        collection = optimizer.pg_collection
        groups = LayerWise(
            collection.dp_cp if optimizer.dp_cp_params_list else None,
            collection.expt_dp if optimizer.expt_dp_params_list else None,
        )
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is None:
        yield optimizer, groups
    for part in chained or ():
        yield from leaves_and_groups(part, groups)


def hyperparameters(
    group: Mapping[str, Any], names: Sequence[str] = _HYPERPARAMETERS
) -> tuple[tuple[str, float], ...]:
    """The numbers that a parameter group has for the update of its parameters, by name."""
    numbers = []
    for name in names:
        value = group.get(name)
        if isinstance(value, (tuple, list)):
            numbers += [(f"{name}[{index}]", float(item)) for index, item in enumerate(value)]
        elif value is not None:
            numbers.append((name, float(value)))
    return tuple(numbers)


def following(states: Mapping[Any, Any], group: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    """The numbers that the next update depends on, which a step changes, by name."""
    return hyperparameters(with_step(states, group), _FOLLOWING)


def with_step(states: Mapping[Any, Any], group: Mapping[str, Any]) -> Mapping[str, Any]:
    """A parameter group with the steps that were made; if these differ, the rarest number.

    torch's Adam counts for each parameter, whatever a checkpoint has put into the group; fused
    optimizers count there. A user's optimizer may keep anything under this name, or nothing.
    """
    of_parameters = (states.get(one) for one in group.get("params", ()))
    steps = _counted(s for s in of_parameters if isinstance(s, Mapping)) or _counted([group])
    known = {"step": min(steps, key=lambda number: (steps[number], number))} if steps else {}
    return {key: value for key, value in group.items() if key != "step"} | known


def _counted(holders: Iterable[Mapping[str, Any]]) -> Counter[float]:
    """The numbers of steps."""
    return Counter(
        float(step)
        for step in (holder.get("step") for holder in holders)
        if isinstance(step, (int, float)) or (torch.is_tensor(step) and step.numel() == 1)
    )


def group_names(groups: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Names of parameter groups that do not depend on their order or on other groups.

    By what distinguishes them in a checkpoint (``param_group_identifier_keys`` in
    megatron/core/optimizer/optimizer.py). Of several alike all but the first get a number.
    """
    counts: Counter[str] = Counter()
    for group in groups:
        marks = [f"wd_mult={float(group.get('wd_mult', 1.0)):g}"]
        if (rate := group.get("lr_mult", 1.0)) != 1.0:
            marks.append(f"lr_mult={float(rate):g}")
        marks += [mark for mark, name in _MARKS if group.get(name)]
        name = f"param_groups[{','.join(marks)}]"
        counts[name] += 1
        yield name if counts[name] == 1 else f"{name}#{counts[name]}"


def gathered_over(leaf: Any, groups: LayerWise | None, parameters: Mapping[str, Any]) -> Any:
    """The process group whose ranks step a group of parameters in parts.

    ``None`` if each rank steps its own.
    """
    if groups is not None:
        return groups.experts if parameters.get("is_expert_parallel") else groups.common
    divided = hasattr(leaf, "model_param_group_index_map")
    return getattr(leaf, "data_parallel_group", None) if divided else None


def leave_gradients(chunks: list[torch.nn.Module], optimizer: Any) -> None:
    """Fill gradients that are kept from step to step, as a step before this one would have.

    In a run's first step they are zero, whether or not Megatron zeroes them when a step begins.
    """
    _fill(chunks, 1.0)
    for leaf, _ in leaves_and_groups(optimizer):
        # It hands them to the torch optimizer without a copy (prepare_grads).
        for group in leaf.optimizer.param_groups if type(leaf).__name__ == _PLAIN[0] else ():
            for parameter in group["params"]:
                if torch.is_tensor(getattr(parameter, "main_grad", None)):
                    parameter.grad = parameter.main_grad


def zero_gradients(chunks: list[torch.nn.Module]) -> None:
    """Zero them again, so that nothing of :func:`leave_gradients` gets into training.

    Megatron does so when a step begins; if it does not, that fault must not become a larger one.
    """
    _fill(chunks, 0.0)


def _fill(chunks: list[torch.nn.Module], value: float) -> None:
    for chunk in chunks:
        for parameter in chunk.parameters() if bucket_groups(chunk) else ():
            gradient = getattr(parameter, "main_grad", None)
            if torch.is_tensor(gradient):
                gradient.data.fill_(value)  # some of them require gradients themselves


def bucket_groups(chunk: Any) -> list[Any]:
    """The groups of gradient buckets of ``DistributedDataParallel``; other wrappers have none."""
    names = ("bucket_groups", "expert_parallel_bucket_groups")
    return [group for name in names for group in getattr(chunk, name, None) or ()]
