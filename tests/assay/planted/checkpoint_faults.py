# SPDX-License-Identifier: Apache-2.0
"""How saving or loading goes wrong: the mechanisms of ``checkpoints.py``."""

import dataclasses
import functools
import hashlib
import itertools
import random
import re
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from typing import Any

import torch

from tests.assay.planted.live import NUMBER, Key, Live, gathered, random_state, set_random_state
from tests.assay.planted.mistakes import global_rank

MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")


class Side(StrEnum):
    """Which half is wrong."""

    SAVE = "save"
    LOAD = "load"


type Damage = Callable[[Live, random.Random], None]
"""Damages live state."""


@dataclasses.dataclass(frozen=True, slots=True)
class Mechanism:
    """A kind of fault.

    Attributes:
        damage: makes it, on live state.
        sides: that can have it.
        needs: words that a job must have (``tests/assay/checkpoints/jobs.toml``).
        describes: whether it changes the description of shards instead of their values.
    """

    damage: Damage
    sides: tuple[Side, ...]
    needs: frozenset[str]
    describes: bool = False


MECHANISMS: dict[str, Mechanism] = {}


def mechanism(
    *needs: str, sides: Iterable[Side] = Side, describes: bool = False
) -> Callable[[Damage], Damage]:
    """Register a function as the mechanism of its name."""

    def register(damage: Damage) -> Damage:
        MECHANISMS[damage.__name__] = Mechanism(damage, tuple(sides), frozenset(needs), describes)
        return damage

    return register


# --- tensors -------------------------------------------------------------------------------------


@mechanism()
def lost_moment(live: Live, chance: random.Random) -> None:
    """One of a parameter's moments, or both, are zero."""
    chosen, name = live.choose(chance, lambda state, name: state in MOMENTS)
    for state in chance.choice([MOMENTS, (chosen,)]):
        live.change((state, name), torch.zeros_like)


@mechanism()
def lost_moments(live: Live, chance: random.Random) -> None:
    """The moments of all parameters are zero."""
    for key in live.tensors():
        if key[0] in MOMENTS:
            live.change(key, torch.zeros_like)


@mechanism("main")
def stale_main(live: Live, chance: random.Random) -> None:
    """A parameter's main weights are those of an earlier time."""
    key = live.choose(chance, lambda state, name: state == "main")
    live.change(key, lambda old: live.before.get(key, old))


@mechanism("main")
def stale_mains(live: Live, chance: random.Random) -> None:
    """All main weights are those of an earlier time."""
    for key in live.tensors():
        if key[0] == "main":
            live.change(key, lambda old, key=key: live.before.get(key, old))


@mechanism()
def stale_weight(live: Live, chance: random.Random) -> None:
    """A parameter's weights are those of an earlier time."""
    key = live.choose(chance, lambda state, name: state == "weight")
    live.change(key, lambda old: live.before.get(key, old))


@mechanism("main")
def rounded_main(live: Live, chance: random.Random) -> None:
    """Main weights pass through bfloat16."""
    _, name = live.choose(chance, lambda state, name: state == "main")
    everything = chance.random() < 0.5
    for key in live.tensors():
        if key[0] == "main" and (everything or key[1] == name):
            live.change(key, lambda old: old.bfloat16().float())


@mechanism()
def exchanged_states(live: Live, chance: random.Random) -> None:
    """Two parameters of one shape have each other's state of the optimizer."""
    tensors = live.tensors()
    shapes: dict[tuple[str, Any], list[Key]] = {}
    for key in sorted(tensors):
        if key[0] not in ("weight", "buffer"):
            shapes.setdefault((key[0], tuple(tensors[key].shape)), []).append(key)
    pairs = {pair for keys in shapes.values() for pair in itertools.pairwise(keys)}
    pair = chance.choice(sorted(set().union(*gathered(pairs))))
    if pair in pairs:
        _exchange(live, *pair)


def _exchange(live: Live, first: Key, second: Key) -> None:
    tensors = live.tensors()
    values = tensors[first].clone(), tensors[second].clone()
    live.change(first, lambda old: values[1])
    live.change(second, lambda old: values[0])


@mechanism()
def shifted(live: Live, chance: random.Random) -> None:
    """The elements of a tensor begin at another offset, on one rank."""
    key = live.choose(chance, lambda state, name: state != "buffer")
    by, rank = chance.randint(1, 31), _rank_with(live, chance, key)
    if global_rank() == rank:
        live.change(key, lambda old: old.flatten().roll(by).view_as(old))


@mechanism()
def missing_shard(live: Live, chance: random.Random) -> None:
    """One rank's part of a tensor is zero."""
    key = live.choose(chance, lambda state, name: state != "buffer")
    if global_rank() == _rank_with(live, chance, key):
        live.change(key, torch.zeros_like)


def _rank_with(live: Live, chance: random.Random, key: Key) -> int:
    holders = gathered(key in live.tensors() and bool(live.tensors()[key].any()))
    return chance.choice([rank for rank, holds in enumerate(holders) if holds])


@mechanism("gated")
def swapped_halves(live: Live, chance: random.Random) -> None:
    """Gate and up rows of a gated MLP are exchanged."""
    _, name = live.choose(
        chance, lambda state, name: state == "weight" and ".linear_fc1.weight" in name
    )
    shape = live.parameters[name].shape if name in live.parameters else None
    for key in live.related(chance, name):
        # A range of the flattened parameter (ZeRO) has no halves of its own.
        live.change(key, lambda old: torch.cat(old.chunk(2)[::-1]) if old.shape == shape else old)


@mechanism("tp")
def shards_in_other_order(live: Live, chance: random.Random) -> None:
    """The tensor-parallel ranks have each other's part of a parameter."""
    from megatron.core import mpu

    name = _chosen_divided(live, chance)
    _from_others(live, live.related(chance, name), mpu.get_tensor_model_parallel_group())


@mechanism("tp")
def shard_twice(live: Live, chance: random.Random) -> None:
    """The last tensor-parallel rank has the first one's part of a parameter."""
    from megatron.core import mpu

    name = _chosen_divided(live, chance)
    group = mpu.get_tensor_model_parallel_group()
    _from_others(live, live.related(chance, name), group, turned=False)


def _chosen_divided(live: Live, chance: random.Random) -> str:
    divided = {
        name
        for name, parameter in live.parameters.items()
        if getattr(parameter, "tensor_model_parallel", False) and ".experts." not in name
    }
    divided = set().union(*gathered(divided))
    return live.choose(chance, lambda state, name: state == "weight" and name in divided)[1]


@mechanism("ep")
def experts_of_other_ranks(live: Live, chance: random.Random) -> None:
    """The expert-parallel ranks have each other's experts, in one module."""
    from megatron.core import mpu

    _, name = live.choose(chance, lambda state, name: state == "weight" and ".experts." in name)
    module = name.partition(".experts.")[0]
    leaf = name.rpartition(".linear_fc")[2][:1]
    group = mpu.get_expert_model_parallel_group()
    states = _some(chance, {key[0] for key in live.tensors() if ".experts." in key[1]})
    keys = [
        key
        for key in sorted(live.tensors())
        if key[0] in states
        and key[1].startswith(f"{module}.experts.")
        and f".linear_fc{leaf}" in key[1]
    ]
    # Experts have other names on other ranks; their order is the same.
    _from_others(live, keys, group, by_order=True)


def _some(chance: random.Random, states: set[str]) -> list[str]:
    """All states, or those of the optimizer only."""
    everything = sorted(states)
    return chance.choice([everything, [s for s in everything if s != "weight"] or everything])


@mechanism("experts")
def experts_exchanged(live: Live, chance: random.Random) -> None:
    """Two experts of a rank have each other's state."""
    _, name = live.choose(chance, lambda state, name: state == "weight" and ".experts." in name)
    tensors, names = live.tensors(), sorted(live.parameters)
    states = _some(chance, {state for state, owner in tensors if owner == name})
    module = name.rstrip("0123456789")
    experts = [other for other in names if other.rstrip("0123456789") == module]
    if ".local_experts." in name:
        before, local, after = name.partition(".local_experts.")
        leaf = after.partition(".")[2]
        experts = [n for n in names if n.startswith(before + local) and n.endswith(leaf)]
    for state in states:
        keys = [(state, expert) for expert in experts[:2]]
        if len(keys) == 2 and all(key in tensors for key in keys):
            _exchange(live, *keys)


def _from_others(
    live: Live, keys: list[Key], group: Any, *, turned: bool = True, by_order: bool = False
) -> None:
    """Give each rank of a group the values of the one opposite, or all those of the first."""
    tensors = live.tensors()
    mine = [(key, tensors[key].clone()) for key in keys if key in tensors]
    everybody = gathered([value for _, value in mine] if by_order else dict(mine), group)
    rank = torch.distributed.get_rank(group)
    source = everybody[len(everybody) - 1 - rank if turned else 0]
    for order, (key, value) in enumerate(mine):
        new = source[order] if by_order else source.get(key)
        if new is not None and new.shape == value.shape:
            live.change(key, lambda old, new=new: new)


@mechanism("deep")
def layers_off_by_one(live: Live, chance: random.Random) -> None:
    """The layers of one pipeline stage are numbered in a circle from the second."""
    layers = sorted({_layer(name) for _, name in live.tensors()} - {-1})
    stages = gathered(layers)
    rank = chance.choice([rank for rank, stage in enumerate(stages) if len(stage) > 1])
    everything = set().union(*gathered({state for state, _ in live.tensors()}))
    states, stage = _some(chance, everything - {"buffer"}), stages[rank]
    tensors = {key: value.clone() for key, value in live.tensors().items()}
    for key in sorted(tensors):
        state, name = key
        if state in states and _layer(name) in stage and layers == stage:
            other = stage[(stage.index(_layer(name)) + 1) % len(stage)]
            source = (state, name.replace(f".layers.{_layer(name)}.", f".layers.{other}.", 1))
            if source in tensors and tensors[source].shape == tensors[key].shape:
                live.change(key, lambda old, new=tensors[source]: new)


def _layer(name: str) -> int:
    head, _, rest = name.partition("decoder.layers.")
    return int(rest.partition(".")[0]) if rest and not head else -1


@mechanism("bias")
def lost_buffer(live: Live, chance: random.Random) -> None:
    """A buffer of the router is what it was, or zero."""
    key = live.choose(chance, lambda state, name: "expert_bias" in name)
    live.change(key, lambda old: live.before.get(key, old * 0))


# --- numbers -------------------------------------------------------------------------------------


@mechanism("decay")
def lost_schedule(live: Live, chance: random.Random) -> None:
    """The schedule begins anew."""
    live.set(live.scheduler, "num_steps", 0, "num_steps")


@mechanism("decay")
def shifted_schedule(live: Live, chance: random.Random) -> None:
    """The schedule is a step ahead, or behind."""
    from megatron.training import get_args

    by = chance.choice([-1, 1]) * get_args().global_batch_size
    live.set(live.scheduler, "num_steps", live.scheduler.num_steps + by, "num_steps")


@mechanism()
def other_hyperparameter(live: Live, chance: random.Random) -> None:
    """A parameter group has another ``eps``, ``betas`` or ``max_lr``."""
    groups = [group for leaf in live.leaves() for group in leaf.optimizer.param_groups]
    fields = sorted({"eps", "betas", "momentum", "max_lr"} & set(groups[0]))
    field = chance.choice(fields)
    everything = chance.random() < 0.5
    for group in groups if everything else groups[:1]:
        old = group[field]
        new = tuple(value * 0.9 for value in old) if isinstance(old, tuple) else (old or 1e-3) * 0.5
        live.set(group, field, new, field)


@mechanism()
def lost_step_count(live: Live, chance: random.Random) -> None:
    """The optimizer's count of steps is that of a new optimizer."""
    first = chance.choice([0, 1])
    for leaf in live.leaves():
        for group in leaf.optimizer.param_groups:
            if group.get("step"):
                live.set(group, "step", first, "step")
        for state in leaf.optimizer.state.values():
            if torch.is_tensor(state.get("step")) and bool(state["step"] > 1):
                live.set(state, "step", torch.ones_like(state["step"]), "step")


@mechanism()
def replayed_data(live: Live, chance: random.Random) -> None:
    """Samples are seen twice."""
    _shift_samples(live, -1)


@mechanism()
def skipped_data(live: Live, chance: random.Random) -> None:
    """Samples are never seen."""
    _shift_samples(live, 1)


def _shift_samples(live: Live, by: int) -> None:
    from megatron.training import get_args

    args = get_args()
    new = args.consumed_train_samples + by * args.global_batch_size
    live.set(args, "consumed_train_samples", new, "consumed_train_samples")


@mechanism("fp16")
def lost_loss_scale(live: Live, chance: random.Random) -> None:
    """The loss scale is that of another time, or the count until it grows is."""
    field = chance.choice(["_scale", "_growth_tracker"])
    for leaf in live.leaves():
        scaler = leaf.grad_scaler
        new = scaler._scale * 0.25 if field == "_scale" else 0
        live.set(scaler, field, new, "loss_scale")


@mechanism("dropout")
def lost_random_state(live: Live, chance: random.Random) -> None:
    """The generators are those of another time."""
    live.undo.append(functools.partial(set_random_state, random_state()))
    set_random_state(live.before[NUMBER, "rng"])
    live.truth.append((NUMBER, "rng"))


# --- descriptions --------------------------------------------------------------------------------


@mechanism("tp", "torch_dist", sides=[Side.SAVE], describes=True)
def offsets_in_other_order(live: Live, chance: random.Random) -> None:
    """Megatron describes the tensor-parallel ranks' parts of a tensor in the other order."""
    _turn(live, chance, experts=False)


@mechanism("ep", "torch_dist", sides=[Side.SAVE], describes=True)
def expert_offsets_in_other_order(live: Live, chance: random.Random) -> None:
    """Megatron describes the expert-parallel ranks' experts in the other order."""
    _turn(live, chance, experts=True)


def _turn(live: Live, chance: random.Random, *, experts: bool) -> None:
    """Count the ranks along the divided axis of a stored tensor from its end.

    A tensor that is also divided when loading is chosen again then.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    shards: dict[str, list[Any]] = {}
    for shard in _values(live.described):
        if (
            isinstance(shard, ShardedTensor)
            and (".experts." in shard.key) is experts
            and _divided_axis(shard) is not None
        ):
            shards.setdefault(shard.key, []).append(shard)
    names = sorted(set().union(*gathered(set(shards))))
    if not names:
        return
    salt = str(chance.random())
    name = min(names, key=lambda name: hashlib.sha256((salt + name).encode()).hexdigest())
    mine = shards.get(name, ())
    spans = [_span(shard) for shard in mine]
    for shard, (axis, first, _) in zip(mine, spans, strict=True):
        begin, end = min(span[1] for span in spans), max(span[2] for span in spans)
        offsets = list(shard.global_offset)
        offsets[axis] = shard.global_shape[axis] - end + first - begin
        shard.global_offset = tuple(offsets)
        live.truth.append(("described", name))


def _values(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        tree = tree.values()
    if isinstance(tree, (str, bytes)) or not isinstance(tree, Iterable):
        yield tree
    elif not torch.is_tensor(tree):
        for value in tree:
            yield from _values(value)


def _sizes(shard: Any) -> list[int]:
    return [1] * shard.prepend_axis_num + list(shard.local_shape)


def _divided_axis(shard: Any) -> int | None:
    """The axis over experts, or the only other divided one; not that over layers."""
    layers = shard.prepend_axis_num and re.search(r"layers\.\d", shard.key) is None
    sizes = _sizes(shard)
    axes = range(1 if layers else 0, len(sizes))
    return next((axis for axis in axes if sizes[axis] < shard.global_shape[axis]), None)


def _span(shard: Any) -> tuple[int, int, int]:
    """The divided axis, and where the shard begins and ends on it."""
    axis = _divided_axis(shard)
    assert axis is not None
    return axis, shard.global_offset[axis], shard.global_offset[axis] + _sizes(shard)[axis]
