# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.assay conversions``: errors of converting models of Hugging Face, and none."""

import argparse
import contextlib
import dataclasses
import io
import itertools
import json
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatron_ttrace.cli import command
from megatron_ttrace.cli import main as ttrace
from megatron_ttrace.saved.checkpoints import Same
from megatron_ttrace.saved.huggingface.causes import Cause
from megatron_ttrace.trace.errors import ExitCode
from tests.assay import harness
from tests.assay.harness import FALSE_ALARM, Row
from tests.saved.huggingface import made

_EPILOG = """\
example:
  python -m tests.assay conversions --count 60 --seed 7

A seed draws families, sizes, dtypes, paddings and layouts of checkpoints, which Megatron saves.
Some are converted rightly, some with an error, by code that shares nothing with the checker.
'ttrace checkpoint' must find no difference in the former, and in the latter exactly the tensors
that the error changed, with the right cause; none if the error has no name.

exit code: 0 the bars are met; 1 a right conversion has differences; 2 else
"""
BARS = {"same": 1.0, "found": 0.95, "right tensors": 0.95, "right cause": 0.95}

type Tensors = dict[str, torch.Tensor]
type Config = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Fault:
    """An error of a converter.

    Attributes:
        ends: of the name of a tensor that it changes.
        change: makes it, given all of Megatron's tensors and one's name.
        cause: that is right; ``None`` if it has no name.
        within: what the name contains.
    """

    ends: str
    change: Callable[[random.Random, Config, Tensors, str], None]
    cause: Cause | None
    within: str = ""


def _one(change: Callable[[random.Random, Config, torch.Tensor], torch.Tensor]) -> Any:
    """A change of one tensor alone."""

    def wrapped(draw: random.Random, config: Config, ours: Tensors, name: str) -> None:
        ours[name] = change(draw, config, ours[name].contiguous()).contiguous()

    return wrapped


def _heads(config: Config, data: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    groups = config["num_key_value_heads"]
    shared = config["num_attention_heads"] // groups
    return data.view(groups, shared + 2, config["head_dim"], -1), groups, shared


def _not_by_groups(draw: random.Random, config: Config, data: torch.Tensor) -> torch.Tensor:
    view, _, shared = _heads(config, data)
    parts = view[:, :shared], view[:, shared], view[:, shared + 1]
    return torch.cat([part.flatten() for part in parts]).view(data.shape)


def _keys_for_values(draw: random.Random, config: Config, data: torch.Tensor) -> torch.Tensor:
    view, _, shared = _heads(config, data)
    return view[:, [*range(shared), shared + 1, shared]].reshape(data.shape)


def _groups_moved(draw: random.Random, config: Config, data: torch.Tensor) -> torch.Tensor:
    return _heads(config, data)[0].roll(draw.randint(1, 3), 0).reshape(data.shape)


def _heads_dealt(draw: random.Random, config: Config, data: torch.Tensor) -> torch.Tensor:
    view, groups, shared = _heads(config, data)
    view = view.clone()
    dealt = view[:, :shared].reshape(shared, groups, *view.shape[2:]).transpose(0, 1).clone()
    view[:, :shared] = dealt.reshape(view[:, :shared].shape)
    return view.reshape(data.shape)


def _rotary(draw: random.Random, config: Config, data: torch.Tensor) -> torch.Tensor:
    view, _, shared = _heads(config, data)
    view, half = view.clone(), config["head_dim"] // 2
    shape = (half, 2) if draw.random() < 0.5 else (2, half)
    order = torch.arange(2 * half).view(shape).T.flatten()
    view[:, : shared + 1] = view[:, : shared + 1][:, :, order]
    return view.reshape(data.shape)


def _halves(draw: random.Random, config: Config, data: torch.Tensor) -> torch.Tensor:
    return torch.cat([*data.chunk(2)[::-1]])


def _not_by_halves(draw: random.Random, config: Config, data: torch.Tensor) -> torch.Tensor:
    return torch.stack(data.chunk(2), 1).reshape(data.shape)


def _experts(draw: random.Random, config: Config, ours: Tensors, name: str) -> None:
    before, expert, after = name.partition(".experts.experts.")
    leaf = after.partition(".")[2]
    names = [n for n in ours if n.startswith(before + expert) and n.endswith(leaf)]
    order = draw.sample(names, len(names))
    ours.update(dict(zip(names, [ours[n] for n in order], strict=True)))


def _layers(draw: random.Random, config: Config, ours: Tensors, name: str) -> None:
    leaf = name.split(".", 3)[3]
    names = [n for n in ours if n.startswith("decoder.layers.") and n.split(".", 3)[3] == leaf]
    moved = [ours[n] for n in names]
    ours.update(zip(names, [*moved[1:], moved[0]], strict=True))


def _exchanged(other: Callable[[str], str]) -> Any:
    def change(draw: random.Random, config: Config, ours: Tensors, name: str) -> None:
        ours[name], ours[other(name)] = ours[other(name)], ours[name]

    return change


def _halves_and_element(draw: random.Random, config: Config, data: torch.Tensor) -> torch.Tensor:
    return _element(draw, config, _halves(draw, config, data))


def _part_twice(draw: random.Random, config: Config, data: torch.Tensor) -> torch.Tensor:
    half = len(data) // 2
    return torch.cat([data[:half], data[:half], data[2 * half :]])


def _element(draw: random.Random, config: Config, data: torch.Tensor) -> torch.Tensor:
    data = data.clone()
    data.view(-1)[draw.randrange(data.numel())] += 1
    return data


def _dropped(draw: random.Random, config: Config, ours: Tensors, name: str) -> None:
    del ours[name]


QKV, FC1 = "linear_qkv.weight", "linear_fc1.weight"
HEAD, EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"
FAULTS: Mapping[str, Fault] = {
    "q, k and v below each other": Fault(QKV, _one(_not_by_groups), Cause.QKV),
    "biases below each other": Fault("linear_qkv.bias", _one(_not_by_groups), Cause.QKV),
    "k for v": Fault(QKV, _one(_keys_for_values), Cause.QKV),
    "groups moved": Fault(QKV, _one(_groups_moved), Cause.GROUPS),
    "heads dealt to groups": Fault(QKV, _one(_heads_dealt), Cause.HEADS),
    "rotary order": Fault(QKV, _one(_rotary), Cause.ROTARY),
    "gate for up": Fault(FC1, _one(_halves), Cause.GATE_UP),
    "gate and up mixed": Fault(FC1, _one(_not_by_halves), Cause.MIXED),
    "experts": Fault(FC1, _experts, Cause.EXPERT, ".experts."),
    "experts of fc2": Fault("linear_fc2.weight", _experts, Cause.EXPERT, ".experts."),
    "layers shifted": Fault("linear_proj.weight", _layers, Cause.LAYER),
    "layers of norms shifted": Fault("layer_norm_weight", _layers, Cause.LAYER),
    "q norm for k norm": Fault(
        "q_layernorm.weight",
        _exchanged(lambda name: name.replace(".q_", ".k_")),
        Cause.TENSOR,
    ),
    "head for embedding": Fault(HEAD, _exchanged(lambda name: EMBEDDING), Cause.TENSOR),
    "transposed": Fault("linear_proj.weight", _one(lambda *a: a[2].T), Cause.TRANSPOSED),
    "columns": Fault(
        "linear_proj.weight", _one(lambda draw, config, data: data.roll(1, 1)), Cause.COLUMNS
    ),
    "router rows": Fault("router.weight", _one(lambda *a: a[2].flip(0)), Cause.ROWS),
    "norm plus 1": Fault("layernorm.weight", _one(lambda *a: a[2] + 1), Cause.SHIFTED),
    "norm of ones": Fault("norm_weight", _one(lambda *a: a[2] * 0 + 1), Cause.CONSTANT),
    "never loaded": Fault(FC1, _one(lambda *a: torch.zeros_like(a[2])), Cause.CONSTANT),
    "another start": Fault(QKV, _one(lambda *a: torch.randn_like(a[2])), None),
    "gate for up and an element": Fault(FC1, _one(_halves_and_element), None),
    "a rank's part twice": Fault(QKV, _one(_part_twice), None),
    "an element": Fault("weight", _one(_element), None),
    "rounded": Fault(
        "linear_fc2.weight", _one(lambda *a: a[2].bfloat16().to(a[2].dtype)), Cause.ROUNDED
    ),
    "rows cut off": Fault(HEAD, _one(lambda *a: a[2][: a[1]["vocab_size"] - 1]), Cause.CUT),
    "random padding": Fault(
        HEAD, _one(lambda *a: torch.cat([a[2], torch.randn_like(a[2][:2])])), Cause.PADDED
    ),
    "norm dropped": Fault("layernorm.weight", _dropped, None),
    "bias dropped": Fault("linear_qkv.bias", _dropped, None),
}


_HYBRID = ("nemotron_h",)
"""Families whose layers differ: they are not stacked, MLPs have no gates, heads are not tied."""


def _config(draw: random.Random) -> dict[str, Any]:
    heads = draw.choice((4, 8))
    config = {
        **made.CONFIGS[draw.choice([*made.CONFIGS])],
        "num_hidden_layers": draw.randint(2, 4),
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice([n for n in (1, 2, 4, 8) if n <= heads]),
        "head_dim": draw.choice((4, 8)),
        "hidden_size": draw.choice((16, 24)),
        "intermediate_size": draw.choice((12, 20)),
        "vocab_size": draw.randint(20, 60),
        "tie_word_embeddings": draw.random() < 0.3,
    }
    config["tie_word_embeddings"] &= config["model_type"] not in _HYBRID
    experts = draw.choice((2, 4, 8))
    config |= {
        name: experts
        for name in ("num_experts", "num_local_experts", "n_routed_experts")
        if name in config
    }
    if "mlp_only_layers" in config:
        config["mlp_only_layers"] = draw.choice(([], [0]))
    if "first_k_dense_replace" in config:
        config["first_k_dense_replace"] = len(config["mlp_only_layers"])
    return config


@dataclasses.dataclass(frozen=True)
class Conversion:
    """One that a seed draws: ``fault`` is its error, empty for none."""

    fault: str
    seed: str

    @property
    def id(self) -> str:
        """Its name."""
        return f"{self.fault or 'right'} {self.seed}"


def sample(seed: int) -> Iterator[Conversion]:
    """Conversions without end: a right one, and one with an error, in turn."""
    draw = random.Random(seed)
    for number in itertools.count():
        fault = draw.choice([*FAULTS]) if number % 2 else ""
        yield Conversion(fault, f"{seed}/{number}")


def attempt(case: Conversion, folder: Path) -> Row | None:
    """Convert and check; ``None`` if the fault does not apply or changes nothing."""
    draw = random.Random(case.seed)
    config = _config(draw)
    torch.manual_seed(draw.randrange(1 << 30))
    dtype = (
        torch.float32 if case.fault == "rounded" else draw.choice((torch.float32, torch.bfloat16))
    )
    state = made.files(config, dtype)
    wide = torch.float32 if draw.random() < 0.3 else dtype
    right = {name: data.to(wide) for name, data in made.converted(config, state).items()}
    padding, copied = draw.choice((0, 3, 8)), draw.random() < 0.5
    for name in {HEAD, EMBEDDING} & right.keys():
        rows = right[name][-1:].expand(padding, -1)
        right[name] = torch.cat([right[name], rows if copied else torch.zeros_like(rows)])
    ours = dict(right)
    fault = FAULTS.get(case.fault)
    if fault is not None:
        if fault.cause in (Cause.GATE_UP, Cause.MIXED) and config["model_type"] in _HYBRID:
            return None
        names = [name for name in ours if name.endswith(fault.ends) and fault.within in name]
        if not names:
            return None
        fault.change(draw, config, ours, draw.choice(names))
    changed = {
        name
        for name, data in right.items()
        if name not in ours or ours[name].shape != data.shape or (ours[name] != data).any()
    }
    if fault is not None and not changed:
        return None
    shapes = [{name: data.shape for name, data in tensors.items()} for tensors in (ours, right)]
    stacked = draw.random() < 0.5 and config["model_type"] not in _HYBRID
    stacked &= shapes[0] == shapes[1]
    parts = draw.choice((1, 2, 4))
    model, checkpoint = folder / "model", folder / "checkpoint"
    for place in (model, checkpoint):
        shutil.rmtree(place, ignore_errors=True)
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(config))
    contiguous = {name: data.contiguous() for name, data in state.items()}
    save_file(contiguous, model / "model.safetensors")
    _save(made.stacked(config, ours) if stacked else ours, checkpoint, parts)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = ttrace.main(["checkpoint", "--json", str(model), str(checkpoint)])
    weights = json.loads(output.getvalue())["weights"]
    absent, causes = changed - ours.keys(), {}
    for weight in weights:
        if not weight["same"].startswith("same"):
            # What is absent is named as in the model.
            is_absent = weight["same"] == Same.ONLY_A and absent
            causes[absent.pop() if is_absent else weight["name"]] = weight["cause"]
    layout = f"{config['model_type']}, {parts} parts{', stacked' * stacked}"
    note = f"{layout}, exit code {code}: {causes}"
    details = {"changed": sorted(changed)}
    if fault is None:
        marks = {"same": code == ExitCode.EQUIVALENT}
        if code == ExitCode.DIVERGED:
            marks[FALSE_ALARM] = True
        return Row(case.id, "right", marks, note, details=details)
    found = code == ExitCode.DIVERGED
    marks = {"found": found, "right tensors": changed == causes.keys()}
    marks["right cause"] = found and set(causes.values()) <= {fault.cause}
    return Row(case.id, case.fault, marks, note, details=details)


def _save(tensors: Tensors, folder: Path, parts: int) -> None:
    """Have Megatron save tensors in parts of their first dimension, where that can be divided."""
    from megatron.core import dist_checkpointing

    made = dist_checkpointing.ShardedTensor.from_rank_offsets
    state = {}
    for name, data in tensors.items():
        count = parts if len(data) % parts == 0 else 1
        for number, part in enumerate(data.tensor_split(count)):
            state[f"{name}/{number}"] = made(name, part.clone(), (0, number, count))
    folder.mkdir()
    dist_checkpointing.save({**state, "iteration": 1}, str(folder))


def add_parser(subparsers: command.Subparsers) -> None:
    """Add the ``conversions`` command."""
    harness.add(
        *(subparsers, "conversions", _run),
        summary="plant errors of converting models of Hugging Face and count how many are found",
        epilog=_EPILOG,
        count=40,
        seed="required",
        only=False,
    )


def _run(args: argparse.Namespace) -> int:
    from megatron_ttrace import cpu

    cpu.activate()
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)

    def attempted(case: Conversion) -> Row | None:
        is_wanted = counts[bool(case.fault)] < args.count
        row = attempt(case, args.directory) if is_wanted else None
        counts[bool(case.fault)] += row is not None
        return row

    def enough(rows: list[Row]) -> bool:
        return len(rows) >= 2 * args.count

    counts = {True: 0, False: 0}
    return harness.finish(harness.execute(sample(args.seed), attempted, args, enough=enough), BARS)
