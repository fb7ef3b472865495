# SPDX-License-Identifier: Apache-2.0
"""What the optimizer owns on this rank: main parameters, moments, and ZeRO ranges.

In megatron/core/optimizer, ``FP32Optimizer`` steps the model's own parameters,
``Float16OptimizerWithFloat16Params`` float32 copies of them, and ``DistributedOptimizer`` a flat
range of (a copy of) each, divided as the data-parallel buckets are. ``ChainedOptimizer`` is a list
of these; ``LayerWiseDistributedOptimizer`` is one whose parameters are divided among the
data-parallel ranks, each as a whole. The torch optimizer in one of them may be a
``HybridDeviceOptimizer``, which divides its parameters among optimizers on the GPU and in the
host's memory.
"""

import dataclasses
import functools
import inspect
from collections.abc import Iterator, Mapping
from itertools import chain
from types import CodeType, MappingProxyType
from typing import Any

import torch

from megatron_ttrace.mcore.buffers import Buffers
from megatron_ttrace.mcore.names import unwrap
from megatron_ttrace.mcore.sharded_weights import (
    are_published,
    groups_of,
    like,
    local,
    parts_of,
    publish,
    rows_of,
)
from megatron_ttrace.trace.copies import Copies, Copy
from megatron_ttrace.trace.records import Kind

_ADAM = {"exp_avg": Kind.EXP_AVG, "exp_avg_sq": Kind.EXP_AVG_SQ}
_MOMENTUM = {"momentum_buffer": Kind.EXP_AVG}

MOMENTS: Mapping[str, Mapping[str, Kind]] = MappingProxyType(
    {
        "Adam": _ADAM,
        "AdamW": _ADAM,
        "FusedAdam": _ADAM,
        "SOAP": _ADAM,
        "Lion": {"exp_avg": Kind.EXP_AVG},
        "SGD": _MOMENTUM,
        "FusedSGD": _MOMENTUM,
        "TensorParallelMuon": _MOMENTUM,
        "TensorParallelAdaptiveMuon": {**_MOMENTUM, "moment2_buffer": Kind.EXP_AVG_SQ},
    }
)
"""Running means that torch optimizers keep of each parameter's gradient and of its square, by the
optimizer's class and by their names in its state."""
_KNOWN = ("torch.", "apex.", "transformer_engine.", "emerging_optimizers.", "megatron")
"""Starts of the modules whose classes are what their names say."""
_STEEP = 1e-3
"""Where the argument of a sign is below this, the step counts in proportion: a tenth of the start
values of moments (run/start/moments.py)."""


@dataclasses.dataclass(frozen=True)
class Owned:
    """The part of one model parameter that this rank's optimizer steps.

    Attributes:
        main: the tensor that is stepped.
        inner: the torch optimizer that steps it.
        group: its parameter group there.
        range: its elements of the flattened local parameter; ``None`` for all.
        sharded: with FSDP, the sharded tensor that ``main`` is this rank's part of.
        computed: with FSDP, the same elements of what the model computes with, if they are here.
        counter: in a ``HybridDeviceOptimizer``, the group in which ``inner`` may count its steps.
    """

    main: torch.Tensor
    inner: torch.optim.Optimizer
    group: dict[str, Any]
    range: tuple[int, int] | None = None
    sharded: torch.Tensor | None = None
    computed: torch.Tensor | None = None
    counter: dict[str, Any] | None = None

    @property
    def key(self) -> torch.Tensor:
        """The key of this tensor in the torch optimizer."""
        return self.main if self.sharded is None else self.sharded

    @property
    def state(self) -> dict[str, Any]:
        """The optimizer's state of this tensor; empty before its first step."""
        # Not inner.state[key]: that would create an entry.
        state: dict[str, Any] = self.inner.state.get(self.key, {})
        if is_precision_aware(self.inner):
            inner: Any = self.inner
            state = {name: inner.get_unscaled_state(self.key, name) for name in state}
        return {
            name: local(value) if torch.is_tensor(value) else value for name, value in state.items()
        }

    @property
    def weights(self) -> torch.Tensor:
        """The values that are stepped: those of ``main``, or what the torch optimizer has of it.

        TransformerEngine's Adam may own main weights; ``main`` is then a part of the model's own
        parameter, and with ``store_param_remainders`` the state has the 16 bits that it lacks.
        """
        master: torch.Tensor | None = self.state.get("master_param")
        if master is None or self.main.dtype == torch.float32:
            return self.main
        if master.dtype != torch.int16:
            return master
        return with_remainders(self.main.detach(), master)

    def received(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """The values that are stepped, or the model's own where those are not these, rounded.

        So an update that was computed and never copied to the model is missing in the result.
        Quantized parameters, and main weights that the torch optimizer keeps, are returned as they
        are stepped.
        """
        main, weight = self.weights.detach(), self.copied(parameter)
        if weight is None:
            return main
        weight = weight.view_as(main).to(main.device)
        rounded = main.to(weight.dtype)
        if torch.equal(rounded, weight):
            return main
        return torch.where(rounded != weight, weight.to(main.dtype), main)

    def copied(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """What the model computes with, if an update has to be copied there."""
        weight = parameter.data if self.sharded is None else self.computed
        is_plain = type(weight) is torch.Tensor and weight.itemsize > 1
        if weight is None or not is_plain or self.weights is not self.main:
            return None
        part = None if self.sharded is not None else self.range
        return weight.reshape(-1)[slice(*part)] if part else weight

    def moment(self, name: str) -> Any:
        """A part of the state in the dtype in which it is kept, if that has the same numbers."""
        value = self.state.get(name)
        kept = getattr(self.inner, "name_to_dtype_map", {}).get(name)
        return value.to(kept) if torch.is_tensor(value) and kept == torch.bfloat16 else value

    @property
    def steps_by_sign(self) -> bool:
        """Whether each element's step is a sign, so that rounding may turn it around."""
        return family(self.inner) == "Lion"

    @property
    def decisive(self) -> list[torch.Tensor]:
        """What a step is about to change, and has to be known before it."""
        moment = self.state.get("exp_avg") if self.steps_by_sign else None
        return [self.weights, *(() if moment is None else (moment,))]

    def smooth(self, step: torch.Tensor, before: torch.Tensor | float = 0.0) -> torch.Tensor:
        """A step by signs as a continuous function of the gradient: small where the sign changes.

        Lion's is the sign of its first moment ``before`` the step, mixed with the gradient
        (emerging_optimizers/scalar_optimizers/lion.py).
        """
        after = self.state.get("exp_avg")
        if after is None:
            return step  # it was skipped
        mixing, keeping = self.group["betas"]
        gradient = (after - keeping * before) / (1 - keeping)
        mixed: torch.Tensor = mixing * before + (1 - mixing) * gradient
        return step * (mixed.abs() / _STEEP).clamp(max=1.0)

    @property
    def moments(self) -> Mapping[str, Kind]:
        """The names of its moments (:data:`MOMENTS`); empty for an unknown optimizer."""
        return MOMENTS.get(family(self.inner), {})


def family(inner: torch.optim.Optimizer) -> str:
    """The name of a torch optimizer's class, or of a base in :data:`MOMENTS` that makes its state.

    Which is torch's way (``_init_group``): what a class makes for itself is not known, and has no
    moments, whatever the class is called.
    """
    kind: Any = type(inner)
    return _family(kind)


@functools.cache
def _family(kind: type) -> str:
    makes = getattr(kind, "_init_group", None)
    steps = next((base for base in kind.__mro__ if "step" in vars(base)), kind)
    for base in kind.__mro__:
        moments = MOMENTS.get(base.__name__)
        if moments is None or getattr(base, "_init_group", None) is not makes:
            continue
        if base.__module__.startswith(_KNOWN):
            # A step of somebody's own may call this one's, or use the same state.
            if issubclass(base, steps) or _words(steps) & {"super", "_init_group", *moments}:
                return base.__name__
        elif _words(*kind.__mro__[:-1]) >= moments.keys():
            return base.__name__
    return kind.__name__ if kind.__name__ not in MOMENTS else f"{kind.__module__}.{kind.__name__}"


def _words(*classes: type) -> set[str]:
    """Names and texts in the code of the functions of classes, but for what makes objects."""
    codes = [
        code
        for one in classes
        for name, value in vars(one).items()
        if (code := getattr(inspect.unwrap(value), "__code__", None)) and name != "__init__"
    ]
    words: set[str] = set()
    while codes:
        code = codes.pop()
        words |= {*code.co_names, *(value for value in code.co_consts if isinstance(value, str))}
        codes += [value for value in code.co_consts if isinstance(value, CodeType)]
    return words


def unknown(optimizer: Any) -> list[str]:
    """Classes of torch optimizers whose state is not known (:data:`MOMENTS`)."""
    outer = [leaf.optimizer for leaf in leaves_of(optimizer) if getattr(leaf, "optimizer", None)]
    families = (family(inner) for each in outer for inner in _inside(each) or [each])
    return [name for name in dict.fromkeys(families) if name not in MOMENTS]


def is_precision_aware(inner: torch.optim.Optimizer) -> bool:
    """Whether this is TransformerEngine's Adam with state of fewer bits, or with main weights."""
    dtypes = getattr(inner, "name_to_dtype_map", {})
    return bool(getattr(inner, "master_weights", False)) or any(
        dtype != torch.float32 for dtype in dtypes.values()
    )


def leaves_of(optimizer: Any) -> Iterator[Any]:
    """The optimizers in a (nested) ``ChainedOptimizer``."""
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is None:
        yield optimizer
    for part in chained or ():
        yield from leaves_of(part)


def every_optimizer(optimizer: Any) -> list[Any]:
    """An optimizer and all in it: Megatron's, and torch's."""
    parts = [every_optimizer(part) for part in getattr(optimizer, "chained_optimizers", ())]
    outer = [optimizer, *chain(*parts)]
    return outer if parts else outer + _torch_optimizers(optimizer)


def with_remainders(weights: torch.Tensor, remainders: torch.Tensor) -> torch.Tensor:
    """Main weights of which bf16 weights are the upper 16 bits (``store_param_remainders``)."""
    high = weights.view(torch.int16).to(torch.int32) << 16
    return (high + remainders.to(torch.int32)).view(torch.float32)


def stored_main(stored: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Main weights of ``weights`` as a checkpoint has them: itself, or only the lower 16 bits.

    These are stored as numbers, like main weights, which would round to the weights.
    """
    whole = stored.abs().le(1 << 15) & stored.eq(stored.trunc())
    is_main = torch.equal(stored.to(weights.dtype), weights) or not bool(whole.all())
    if is_main or weights.dtype != torch.bfloat16 or stored.shape != weights.shape:
        return stored
    return with_remainders(weights, stored)


def scalers_of(optimizer: Any) -> list[Any]:
    """The gradient scalers of an optimizer's parts; none where there is no loss scale."""
    scalers = (getattr(leaf, "grad_scaler", None) for leaf in leaves_of(optimizer))
    return [scaler for scaler in scalers if scaler is not None]


def owned_by(optimizer: Any) -> dict[torch.nn.Parameter, Owned]:
    """The stepped part of each model parameter, except those that the optimizer does not have."""
    owned: dict[torch.nn.Parameter, Owned] = {}
    for leaf in leaves_of(optimizer):
        inner = getattr(leaf, "optimizer", None)
        if inner is None or getattr(leaf, "is_stub_optimizer", False):
            continue
        groups = {id(p): group for group in inner.param_groups for p in group["params"]}
        parts = parts_of(getattr(leaf, "model_chunks", ()))
        if parts:
            for parameter, part in parts.items():
                if id(parameter) in groups:
                    group = groups[id(parameter)]
                    owned[parameter] = Owned(
                        part.stepped, inner, group, part.range, parameter, computed=part.computed
                    )
            continue
        if hasattr(leaf, "model_param_group_index_map"):
            # Not by model_param_group_index_map: its places in a group are those without a dtype.
            models = zip(leaf.model_fp32_groups, leaf.model_float16_groups, strict=True)
            for group, parameters in zip(inner.param_groups, models, strict=True):
                for parameter, main in zip(chain(*parameters), group["params"], strict=True):
                    part = leaf._get_model_param_range_map(parameter)["param"]
                    owned[parameter] = Owned(main, inner, group, (part.start, part.end))
            if _inside(inner):
                owned |= {p: _by_device(owned[p]) for p in leaf.model_param_group_index_map}
            continue
        pairs = [(p, p) for group in inner.param_groups for p in group["params"]]
        if hasattr(leaf, "fp32_from_float16_groups"):
            halves = chain(*leaf.float16_groups), chain(*leaf.fp32_from_float16_groups)
            pairs = [*zip(*halves, strict=True)]
            pairs += [(p, p) for group in leaf.fp32_from_fp32_groups for p in group]
        for parameter, main in pairs:
            rows = rows_of(parameter)
            sharded, computed = (None, None) if rows is None else (main, local(parameter))
            group = groups[id(main)]
            owned[parameter] = Owned(local(main), inner, group, rows, sharded, computed=computed)
    return owned


def _inside(inner: Any) -> list[torch.optim.Optimizer]:
    """The optimizers that a ``HybridDeviceOptimizer`` steps with; none for others."""
    return list(getattr(inner, "sub_optimizers", ()))


def _by_device(part: Owned) -> Owned:
    """What a ``HybridDeviceOptimizer`` steps for one of its parameters, and the optimizer in it.

    The learning rate is that of its own group, which it hands on.
    """
    hybrid: Any = part.inner
    main = hybrid.param_to_inner_param[part.main]
    for inner in _inside(hybrid):
        for group in inner.param_groups:
            if any(parameter is main for parameter in group["params"]):
                return dataclasses.replace(part, main=main, inner=inner, counter=group)
    return part


def reload_offloaded(optimizer: Any) -> None:
    """Copy a ``HybridDeviceOptimizer``'s parameters to what it steps.

    Its own ``update_fp32_param_by_new_param`` leaves out copies of float32 parameters.
    """
    for leaf in leaves_of(optimizer):
        copies = getattr(getattr(leaf, "optimizer", None), "param_to_inner_param", {})
        for parameter, copy in copies.items():
            copy.data.copy_(parameter.data)


def writes_later(optimizer: Any) -> bool:
    """Whether the model gets updated weights when they are gathered, and not by the update.

    So it is where the buffer of gradients is reused for them
    (``_copy_main_params_to_param_buffer`` in megatron/core/optimizer/distrib_optimizer.py).
    """
    config = getattr(optimizer, "config", None)
    names = "reuse_grad_buf_for_mxfp8_param_ag", "overlap_param_gather"
    return all(getattr(config, name, None) is True for name in names)


def divided(optimizer: Any) -> set[torch.nn.Parameter]:
    """All parameters that are divided over data-parallel ranks, owned here or elsewhere."""
    in_buffers = {
        parameter
        for leaf in leaves_of(optimizer)
        if hasattr(leaf, "model_param_group_index_map")
        for buffer in getattr(leaf, "buffers", ())
        for parameter in buffer.params
    }
    in_groups = {
        parameter.sharded
        for leaf in leaves_of(optimizer)
        for chunk in getattr(leaf, "model_chunks", ())
        for group in groups_of(chunk)
        for parameter in group.fsdp_parameters
    }
    return in_buffers | in_groups | layer_wise(optimizer)


def layer_wise(optimizer: Any) -> set[torch.nn.Parameter]:
    """Parameters that are divided as wholes: one data-parallel rank steps each of them."""
    parameters: set[torch.nn.Parameter] = set()
    for part in getattr(optimizer, "chained_optimizers", ()):
        parameters |= layer_wise(part)
    for name in ("dp_cp_params_list", "expt_dp_params_list"):
        parameters.update(*(getattr(optimizer, name, None) or ()))
    return parameters


class Snapshot:
    """A copy of all state that a training step changes, so that the step can be replayed.

    Parameters and buffers of the model, main parameters, moments, the optimizer's scalar settings,
    the loss scale, and random states.
    """

    def __init__(
        self, chunks: list[torch.nn.Module], optimizer: Any, copies: Copies | None = None
    ) -> None:
        """Copy everything. ``copies`` copies parameters and moments; by default in memory.

        Raises:
            TTraceError: when they fit neither in memory nor on the disk.
        """
        copies = copies or Copies()
        self._chunks = chunks
        self._inner = _torch_optimizers(optimizer)
        mains = [p for i in self._inner for group in i.param_groups for p in group["params"]]
        # Sharded weights exist only as the parts that the optimizer steps.
        models = [] if are_published(chunks) else [unwrap(chunk) for chunk in chunks]
        weights = [parameter for model in models for parameter in model.parameters()]
        tensors = list(dict.fromkeys((*weights, *mains)))
        state = [v for i in self._inner for s in i.state.values() for v in s.values()]
        buffers = [buffer for chunk in chunks for buffer in unwrap(chunk).buffers()]
        changed = (*tensors, *buffers, *state)
        sizes = [local(value).nbytes for value in changed if torch.is_tensor(value)]
        if tensors:
            copies.require_space(local(tensors[0]).device, sum(sizes))
        self._tensors = [(tensor, copies.copy(local(tensor))) for tensor in tensors]
        self._buffers = Buffers(chunks, copies)
        self._states = [
            {
                parameter: {
                    name: copies.copy(local(value)) if torch.is_tensor(value) else value
                    for name, value in state.items()
                }
                for parameter, state in inner.state.items()
            }
            for inner in self._inner
        ]
        self._scales = [
            {p: _copies(scales) for p, scales in getattr(inner, "_scales", {}).items()}
            for inner in self._inner
        ]
        self._settings = [
            [
                _copies({name: value for name, value in group.items() if name != "params"})
                for group in inner.param_groups
            ]
            for inner in self._inner
        ]
        self._scalers = [(scaler, _copies(vars(scaler))) for scaler in scalers_of(optimizer)]
        self._rng = torch.get_rng_state()
        on_gpu = torch.version.cuda is not None and torch.cuda.device_count() > 0
        self._cuda_rng = torch.cuda.get_rng_state() if on_gpu else None

    def restore(self) -> None:
        """Restore everything, in place where other objects hold references."""
        with torch.no_grad():
            for tensor, copy in self._tensors:
                copy.put(local(tensor.data))
            self._buffers.restore()
            for inner, states, scales, settings in zip(
                self._inner, self._states, self._scales, self._settings, strict=True
            ):
                if scales:
                    inner._scales = {p: _copies(values) for p, values in scales.items()}
                for parameter in [p for p in inner.state if p not in states]:
                    del inner.state[parameter]
                for parameter, state in states.items():
                    _restore_state(inner.state[parameter], state, parameter)
                for group, values in zip(inner.param_groups, settings, strict=True):
                    _restore_state(group, {"params": group["params"], **values})
            for scaler, values in self._scalers:
                _restore_state(vars(scaler), values)
            publish(self._chunks)
        torch.set_rng_state(self._rng)
        if self._cuda_rng is not None:
            torch.cuda.set_rng_state(self._cuda_rng)


def _torch_optimizers(optimizer: Any) -> list[Any]:
    """All of them, also those inside others."""
    inner = (getattr(leaf, "optimizer", None) for leaf in leaves_of(optimizer))
    outer = [optimizer for optimizer in inner if optimizer is not None]
    return [inside for optimizer in outer for inside in (optimizer, *_inside(optimizer))]


def _restore_state(
    current: dict[str, Any], saved: dict[str, Any], parameter: torch.Tensor | None = None
) -> None:
    """Restore a dictionary; ``parameter`` is the one whose state it is, if it is a state."""
    for name in [n for n in current if n not in saved]:
        del current[name]
    for name, value in saved.items():
        target = current.get(name)
        if isinstance(value, Copy) and torch.is_tensor(target):
            value.put(local(target.data))
        elif isinstance(value, Copy) and parameter is not None:
            current[name] = like(parameter, value.get().clone())
        elif torch.is_tensor(value) and torch.is_tensor(target):
            target.copy_(value)
        else:
            current[name] = _copied(value)


def _copies(values: dict[str, Any]) -> dict[str, Any]:
    return {name: _copied(value) for name, value in values.items()}


def _copied(value: Any) -> Any:
    return value.detach().clone() if torch.is_tensor(value) else value
