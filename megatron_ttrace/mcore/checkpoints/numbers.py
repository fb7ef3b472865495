# SPDX-License-Identifier: Apache-2.0
"""What training continues from besides tensors: numbers, by names that no layout changes.

``iteration``, ``consumed_train_samples``, ``consumed_valid_samples``, ``opt_param_scheduler.*``,
``loss_scale``, ``grad_scaler.*``, and every parameter group's, ``param_groups[wd_mult=1].lr``. The
number and order of groups depend on the layout; what distinguishes them does not.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from megatron_ttrace.mcore.statistics import group_names

type Number = int | float | bool | str

_OF_ARGUMENTS = ("consumed_train_samples", "consumed_valid_samples")
_BY_NAME = "param_to_group_meta"
_NAMING = ("wd_mult", "lr_mult", "is_decoupled_lr", "is_expert_parallel")
_UNUSED = ("default_config", "params")
"""Of a parameter group: what names it, and what no update uses."""


def of_state(state: Mapping[str, Any]) -> dict[str, Number]:
    """The numbers in a checkpoint's state, all but its tensors.

    Bookkeeping that depends on the layout (floating-point operations, arguments) is left out.
    """
    numbers = _flat("iteration", state.get("iteration"))
    arguments = state.get("args")
    for name in _OF_ARGUMENTS:
        numbers |= _flat(name, getattr(arguments, name, None))
    numbers |= _flat("opt_param_scheduler", state.get("opt_param_scheduler"))
    optimizers = {key: value for key, value in state.items() if "optimizer" in key}
    for scaler in _under(optimizers, "grad_scaler"):
        for name, value in scaler.items():
            numbers |= _flat("loss_scale" if name == "scale" else f"grad_scaler.{name}", value)
    groups = [group for groups in _under(optimizers, "param_groups") for group in groups]
    # With Megatron-FSDP each parameter has the numbers of its group.
    groups += [group for by_name in _under(optimizers, _BY_NAME) for group in by_name.values()]
    return numbers | of_groups(groups)


def of_groups(groups: Iterable[Mapping[str, Any]]) -> dict[str, Number]:
    """The numbers of parameter groups, by what distinguishes the groups.

    Groups that agree are one: pipeline stages and optimizers of experts have their own. Of groups
    that nothing distinguishes but their numbers, the second is called ``[...]#2``, and so on.
    """
    merged: dict[str, dict[str, Number]] = {}
    for group in groups:
        values = {
            name: number
            for key, value in group.items()
            if key not in (*_NAMING, *_UNUSED)
            for name, number in _flat(key, value).items()
        }
        (label,) = group_names([group])
        name, count = label, 1
        while not all(alike(merged.get(name, {}).get(key, v), v) for key, v in values.items()):
            count += 1
            name = f"{label}#{count}"
        merged.setdefault(name, {}).update(values)
    return {
        f"{label}.{key}": value for label, values in merged.items() for key, value in values.items()
    }


def alike(a: Number | None, b: Number | None) -> bool:
    """Whether two numbers are equal. NaN equals NaN."""
    return a == b or (a != a and b != b)


def _under(tree: Any, wanted: str) -> Iterator[Any]:
    """All values of this key."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from [value] if key == wanted else _under(value, wanted)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _under(value, wanted)


def _flat(name: str, value: Any) -> dict[str, Number]:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool | int | float | str):
        return {name: value}
    if isinstance(value, Mapping):
        parts = {f"{name}.{key}": inner for key, inner in value.items()}
    elif isinstance(value, list | tuple):
        parts = {f"{name}[{number}]": inner for number, inner in enumerate(value)}
    else:
        return {}
    return {k: number for part, inner in parts.items() for k, number in _flat(part, inner).items()}
