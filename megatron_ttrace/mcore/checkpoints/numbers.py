# SPDX-License-Identifier: Apache-2.0
"""What training continues from besides tensors: numbers, by names that no layout changes.

``iteration``, ``consumed_train_samples``, ``consumed_valid_samples``, ``opt_param_scheduler.*``,
``grad_scaler.*``, and every parameter group's, ``param_groups[wd_mult=1.0,lr_mult=1.0].lr``. The
number and order of groups depend on the layout; what distinguishes them does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

type Number = int | float | bool | str

_OF_ARGUMENTS = ("consumed_train_samples", "consumed_valid_samples")
_IDENTITY = ("wd_mult", "lr_mult", "is_decoupled_lr")
"""Of a parameter group (``param_group_identifier_keys`` in megatron/core/optimizer/optimizer.py),
without ``is_expert_parallel``, which depends on the layout."""
_BY_LAYOUT = ("is_expert_parallel", "default_config", "params")


def of_state(state: Mapping[str, Any]) -> dict[str, Number]:
    """The numbers in a checkpoint's state, all but its tensors.

    Bookkeeping that depends on the layout (floating-point operations, arguments) is left out.
    """
    found: dict[str, Number] = {}
    found.update(_flat("iteration", state.get("iteration")))
    arguments = state.get("args")
    for name in _OF_ARGUMENTS:
        found.update(_flat(name, getattr(arguments, name, None)))
    found.update(_flat("opt_param_scheduler", state.get("opt_param_scheduler")))
    optimizers = {key: value for key, value in state.items() if key.startswith("optimizer")}
    for scaler in _under(optimizers, "grad_scaler"):
        found.update(_flat("grad_scaler", scaler))
    groups = [group for groups in _under(optimizers, "param_groups") for group in groups]
    return found | of_groups(groups)


def of_groups(groups: Iterable[Mapping[str, Any]]) -> dict[str, Number]:
    """The numbers of parameter groups, by what distinguishes the groups.

    Groups that agree are one: pipeline stages and optimizers of experts have their own. Of groups
    that nothing distinguishes but their numbers, the second is called ``[...]#2``, and so on.
    """
    merged: dict[str, dict[str, Number]] = {}
    for group in groups:
        identity = ",".join(f"{name}={group[name]}" for name in _IDENTITY if name in group)
        values = {
            name: number
            for key, value in group.items()
            if key not in (*_BY_LAYOUT, *_IDENTITY)
            for name, number in _flat(key, value).items()
        }
        label, count = f"param_groups[{identity}]", 1
        name = label
        while any(merged.get(name, {}).get(key, value) != value for key, value in values.items()):
            count += 1
            name = f"{label}#{count}"
        merged.setdefault(name, {}).update(values)
    return {f"{label}.{key}": value for label, of in merged.items() for key, value in of.items()}


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
