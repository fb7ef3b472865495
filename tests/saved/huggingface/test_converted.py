# SPDX-License-Identifier: Apache-2.0
"""Conversions that are right, and such with errors, each with its cause."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_ttrace.mcore.checkpoints.stored import Checkpoint, Format, Stored
from megatron_ttrace.saved.checkpoints import Comparison, Same, Tensor
from megatron_ttrace.saved.huggingface import converted
from megatron_ttrace.saved.huggingface.causes import Cause
from megatron_ttrace.trace.errors import ExitCode, TTraceError
from megatron_ttrace.trace.states import Item, State
from tests.saved.huggingface import made

QKV = "decoder.layers.1.self_attention.linear_qkv.weight"
FC1 = "decoder.layers.1.mlp.linear_fc1.weight"
NORM = "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight"
HEAD = "output_layer.weight"

type State_ = dict[str, torch.Tensor]


def saved(
    folder: Path, config: Mapping[str, Any], state: State_, shards: int = 1
) -> converted.Files:
    """A directory as Hugging Face has it."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = [f"model-{n + 1:05d}-of-{shards:05d}.safetensors" for n in range(shards)]
    where = {name: names[n % shards] for n, name in enumerate(state)}
    for file in names:
        tensors = {name: state[name].contiguous() for name in state if where[name] == file}
        save_file(tensors, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return converted.open_files(folder)


def held(tensors: State_) -> Checkpoint:
    """A checkpoint of Megatron's in memory."""
    items = {
        Item(State.WEIGHT, name): Stored(tuple(data.shape), lambda index, data=data: data[index])
        for name, data in tensors.items()
    }
    return Checkpoint(Format.TORCH_DIST, items)


@pytest.mark.parametrize("config", [*made.CONFIGS.values(), made.BIASED], ids=made.name)
@pytest.mark.parametrize("stacked", [False, True], ids=["apart", "stacked"])
def test_right(config: dict[str, Any], stacked: bool, tmp_path: Path) -> None:
    """Every tensor is the same, whether layers and experts are stacked or not."""
    state = made.files(config, torch.bfloat16)
    ours = made.converted(config, state)
    if stacked:
        ours = made.stacked(config, ours)
    compared = converted.compare(saved(tmp_path, config, state, 3), held(ours))
    assert {tensor.same for tensor in compared.tensors} == {Same.SAME}
    assert compared.code is ExitCode.EQUIVALENT
    assert not compared.notices
    parts = {part.partition("[")[0] for tensor in compared.tensors for part in tensor.parts}
    assert parts == state.keys()


def test_blocks_of_a_mixer(tmp_path: Path) -> None:
    """A checkpoint holds the blocks of a Mamba mixer apart; one of them wrong is a wrong tensor."""
    config = made.CONFIGS["nemotron_h"]
    state = made.files(config)
    ours = made.converted(config, state)
    names = "in_proj.weight", "conv1d.weight", "conv1d.bias"
    for name, blocks in zip(
        names, (("z", "x", "B", "C", "dt"), *2 * [("x", "B", "C")]), strict=True
    ):
        sizes = {"z": 12, "x": 12, "B": 10, "C": 10, "dt": 4}
        block_name = f"decoder.layers.0.mixer.{name}"
        parts = ours.pop(block_name).split([sizes[block] for block in blocks])
        ours |= {f"{block_name}.{block}": part for block, part in zip(blocks, parts, strict=True)}
    folder = saved(tmp_path, config, state)
    assert converted.compare(folder, held(ours)).code is ExitCode.EQUIVALENT
    first, second = (ours[f"{block_name}.{block}"] for block in "BC")
    first[:], second[:] = second.clone(), first.clone()
    wrong = [
        tensor
        for tensor in converted.compare(folder, held(ours)).tensors
        if tensor.same is not Same.SAME
    ]
    assert [(tensor.name, tensor.same) for tensor in wrong] == [(block_name, Same.DIFFERENT)]


def one_wrong(
    tmp_path: Path,
    fault: Callable[[State_], None],
    config: Mapping[str, Any] = made.CONFIGS["llama"],
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Comparison, list[Tensor]]:
    """A conversion with an error, and the tensors that are not the same."""
    state = made.files(config, dtype)
    ours = {name: data.clone() for name, data in made.converted(config, state).items()}
    fault(ours)
    compared = converted.compare(saved(tmp_path, config, state), held(ours))
    return compared, [tensor for tensor in compared.tensors if not tensor.same.is_same]


def heads(*order: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Rows in another order of heads, of 4 rows each."""
    return lambda data: data.view(8, 4, -1)[list(order)].reshape(data.shape)


def rotary(data: torch.Tensor) -> torch.Tensor:
    """Rows of q and k in the order of interleaved rotary embeddings."""
    blocks = data.view(8, 4, -1).clone()
    for number in (0, 1, 2, 4, 5, 6):
        blocks[number] = blocks[number][[0, 2, 1, 3]]
    return blocks.reshape(data.shape)


FAULTS: list[tuple[str, Callable[[torch.Tensor], torch.Tensor], Cause]] = [
    (QKV, heads(0, 1, 4, 5, 2, 6, 3, 7), Cause.QKV),
    (QKV, heads(0, 1, 3, 2, 4, 5, 6, 7), Cause.QKV),
    (QKV, heads(4, 5, 6, 7, 0, 1, 2, 3), Cause.GROUPS),
    (QKV, heads(0, 4, 2, 3, 1, 5, 6, 7), Cause.HEADS),
    (QKV, rotary, Cause.ROTARY),
    (QKV, lambda data: data.flip(0), Cause.ROWS),
    (QKV, lambda data: data.flip(1), Cause.COLUMNS),
    (QKV, lambda data: data.T.contiguous(), Cause.TRANSPOSED),
    (QKV, lambda data: data.bfloat16().float(), Cause.ROUNDED),
    (FC1, lambda data: data.roll(12, 0), Cause.GATE_UP),
    (FC1, lambda data: data.view(2, 12, -1).transpose(0, 1).reshape(24, -1), Cause.MIXED),
    (FC1, lambda data: data[[1, 0, *range(2, 24)]], Cause.ROWS),
    (FC1, lambda data: torch.zeros_like(data), Cause.CONSTANT),
    (NORM, lambda data: data + 1, Cause.SHIFTED),
    (NORM, lambda data: torch.ones_like(data), Cause.CONSTANT),
    (HEAD, lambda data: data[:29], Cause.CUT),
    (HEAD, lambda data: torch.cat([data, data[:2]]), Cause.PADDED),
]


@pytest.mark.parametrize(("name", "change", "cause"), FAULTS)
def test_causes(
    name: str, change: Callable[[torch.Tensor], torch.Tensor], cause: Cause, tmp_path: Path
) -> None:
    """One wrong tensor is named with what was done to it."""

    def fault(ours: State_) -> None:
        ours[name] = change(ours[name])

    compared, wrong = one_wrong(tmp_path, fault, dtype=torch.float32)
    assert [(tensor.name, tensor.cause) for tensor in wrong] == [(name, cause)]
    assert compared.code is ExitCode.DIVERGED


def exchanged(first: str, second: str) -> Callable[[State_], None]:
    """Two tensors in each other's place."""

    def fault(ours: State_) -> None:
        ours[first], ours[second] = ours[second], ours[first]

    return fault


EXPERT = "decoder.layers.1.mlp.experts.experts.0.linear_fc1.weight"


@pytest.mark.parametrize(
    ("model", "first", "second", "cause", "note"),
    [
        ("llama", QKV, QKV.replace("1", "0"), Cause.LAYER, "layers.0.self_attn.q_proj"),
        ("llama", NORM, NORM.replace("1", "0"), Cause.LAYER, "layers.0.input_layernorm"),
        ("llama", NORM, "decoder.final_layernorm.weight", Cause.TENSOR, "model.norm"),
        ("llama", HEAD, "embedding.word_embeddings.weight", Cause.TENSOR, "embed_tokens"),
        ("qwen3_moe", EXPERT, EXPERT.replace("0", "3"), Cause.EXPERT, "experts.3.gate_proj"),
    ],
)
def test_exchanged(
    model: str, first: str, second: str, cause: Cause, note: str, tmp_path: Path
) -> None:
    """Values of other tensors are found wherever they are."""
    _, wrong = one_wrong(tmp_path, exchanged(first, second), made.CONFIGS[model])
    assert {tensor.name: tensor.cause for tensor in wrong} == {first: cause, second: cause}
    assert note in next(tensor.note for tensor in wrong if tensor.name == first)


def test_no_cause(tmp_path: Path) -> None:
    """A changed element has no cause, but a place."""

    def fault(ours: State_) -> None:
        ours[QKV][5, 3] += 1

    _, (wrong,) = one_wrong(tmp_path, fault)
    assert (wrong.cause, wrong.note) == (None, "1 of 32 rows, from 5 to 5")
    assert wrong.rel_err
    assert math.isfinite(wrong.rel_err)


def test_missing(tmp_path: Path) -> None:
    """Tensors that only one of the two has."""

    def fault(ours: State_) -> None:
        del ours[NORM]
        ours["decoder.layers.1.self_attention.linear_proj.bias"] = torch.zeros(16)

    _, wrong = one_wrong(tmp_path, fault)
    assert [(tensor.name, tensor.same) for tensor in wrong] == [
        ("model.layers.1.input_layernorm.weight", Same.ONLY_A),
        ("decoder.layers.1.self_attention.linear_proj.bias", Same.ONLY_B),
    ]


def test_what_is_not_compared(tmp_path: Path) -> None:
    """Layers for multi-token prediction; what follows from the config is not needed."""
    config = made.CONFIGS["qwen2"]
    state = made.files(config)
    ours = made.converted(config, state)
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    model = saved(tmp_path, config, state)
    compared = converted.compare(model, held(ours))
    assert compared.code is ExitCode.EQUIVALENT
    assert len(compared.notices) == 2
    later = ours | {"mtp.layers.0.eh_proj.weight": torch.ones(2, 2)}
    compared = converted.compare(model, held(later))
    assert compared.code is ExitCode.COULD_NOT_CHECK
    assert compared.tensors[-1].name == "multi-token prediction"


def test_two_exports_of_a_model(tmp_path: Path) -> None:
    """One may have what follows from other values; without a tie, the head does not."""
    config = made.CONFIGS["qwen2"]
    state = made.files(config)
    more = {
        **state,
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
        "lm_head.weight": state["model.embed_tokens.weight"].clone(),
    }
    for tied in (True, False):
        tying = {**config, "tie_word_embeddings": tied}
        for name, tensors in (("a", state), ("b", more)):
            saved(tmp_path / name, tying, tensors)
        compared = converted.compare_any(tmp_path / "a", tmp_path / "b")
        only = {tensor.name for tensor in compared.tensors if not tensor.same.is_same}
        assert only == (set() if tied else {"lm_head.weight"})
        assert len(compared.notices) == 1 + tied


def test_layers_that_the_config_does_not_count(tmp_path: Path) -> None:
    """Those of the model, unless it predicts several tokens."""
    config = made.CONFIGS["llama"]
    state = made.files(config)
    ours = made.converted(config, state)
    state["model.layers.7.input_layernorm.weight"] = torch.ones(16)
    compared = converted.compare(saved(tmp_path, config, state), held(ours))
    assert compared.tensors[-1].same is Same.ONLY_A
    predicting = {**config, "num_nextn_predict_layers": 6}
    compared = converted.compare(saved(tmp_path, predicting, state), held(ours))
    assert compared.code is ExitCode.COULD_NOT_CHECK


@pytest.mark.parametrize("pad", [torch.zeros(2, 16), None], ids=["zeros", "repeated"])
def test_padding(pad: torch.Tensor | None, tmp_path: Path) -> None:
    """Zeros and the last row again are what converters append."""

    def fault(ours: State_) -> None:
        for name in (HEAD, "embedding.word_embeddings.weight"):
            rows = ours[name][-1:].expand(2, -1) if pad is None else pad.to(ours[name])
            ours[name] = torch.cat([ours[name], rows])

    compared, wrong = one_wrong(tmp_path, fault)
    assert not wrong
    assert compared.code is ExitCode.EQUIVALENT


def test_the_original_is_megatrons(tmp_path: Path) -> None:
    """A checkpoint that a model was exported from may have trained its padded rows."""
    config = made.CONFIGS["llama"]
    state = made.files(config)
    ours = made.converted(config, state)
    ours[HEAD] = torch.cat([ours[HEAD], ours[HEAD][:2]])
    compared = converted.compare(saved(tmp_path, config, state), held(ours), swapped=True)
    assert compared.code is ExitCode.EQUIVALENT


@pytest.mark.parametrize(
    ("change", "cause", "note"),
    [
        (lambda data: data.half().float(), Cause.ROUNDED, "through float16"),
        (lambda data: data - 1, Cause.SHIFTED, "1 was subtracted"),
        (torch.zeros_like, Cause.CONSTANT, "all are 0"),
    ],
)
def test_errors_of_an_export(
    change: Callable[[torch.Tensor], torch.Tensor], cause: Cause, note: str, tmp_path: Path
) -> None:
    """The model's values are the wrong ones then, and Megatron's the right ones."""
    config = made.CONFIGS["llama"]
    state = {name: data.float() / 3 for name, data in made.files(config).items()}
    ours = made.converted(config, state)
    name = "model.norm.weight"
    exported = {**state, name: change(state[name])}
    compared = converted.compare(saved(tmp_path, config, exported), held(ours), swapped=True)
    (wrong,) = [tensor for tensor in compared.tensors if tensor.same is Same.DIFFERENT]
    assert wrong.name == "decoder.final_layernorm.weight"
    assert (wrong.cause, wrong.note) == (cause, note)


def test_dtypes(tmp_path: Path) -> None:
    """A wider dtype must hold the same value, a narrower one the nearest."""

    def cast(dtype: torch.dtype) -> Callable[[State_], None]:
        return lambda ours: ours.update({name: data.to(dtype) for name, data in ours.items()})

    def inexact(ours: State_) -> None:
        cast(torch.float32)(ours)
        ours[QKV] *= 1 + 2**-12

    for dtype, fault, same in (
        (torch.bfloat16, cast(torch.float32), Same.SAME),
        (torch.float32, cast(torch.bfloat16), Same.ROUNDED),
        (torch.bfloat16, inexact, Same.DIFFERENT),
    ):
        compared, _ = one_wrong(tmp_path, fault, dtype=dtype)
        assert {tensor.name: tensor.same for tensor in compared.tensors}[QKV] is same


def test_damaged_models(tmp_path: Path) -> None:
    """One line for files that do not belong together."""
    config = made.CONFIGS["llama"]
    state = made.files(config)
    ours = held(made.converted(config, state))
    with pytest.raises(TTraceError, match=r"linear_qkv\.weight has 32 rows, by config"):
        converted.compare(saved(tmp_path, {**config, "head_dim": 8}, state), ours)
    saved(tmp_path, config, state, 2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(TTraceError, match=r"00002-of-00002\.safetensors is damaged"):
        converted.open_files(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b"}}')
    with pytest.raises(TTraceError, match=r"index\.json is damaged"):
        converted.open_files(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(TTraceError, match="not an object"):
        converted.open_files(tmp_path)
