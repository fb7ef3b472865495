# SPDX-License-Identifier: Apache-2.0
"""Megatron-Bridge's configuration by the names of Megatron-LM's options."""

import ast
import dataclasses
import importlib
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import megatron_ttrace
from megatron_ttrace import cpu
from megatron_ttrace.mcore.fronts import bridge_options
from megatron_ttrace.mcore.fronts.bridge_options import RENAMED, Options, has_rule
from megatron_ttrace.mcore.options.decisions import QUIET, SINGLE_DEVICE
from megatron_ttrace.mcore.options.roles import ROLES
from megatron_ttrace.trace.errors import TTraceError

FIELDS = tomllib.loads(Path(__file__).with_name("bridge_fields.toml").read_text(encoding="utf-8"))


@dataclasses.dataclass
class Inner:
    params_dtype: str = "float32"
    bf16: bool = True
    apply_rope_fusion: bool = True


@dataclasses.dataclass
class Model:
    num_moe_experts: int | None = 8
    share_embeddings_and_output_weights: bool = True
    tensor_model_parallel_size: int = 2
    make_vocab_size_divisible_by: int = 16
    vocab_size: int = 100
    should_pad_vocab: bool = True
    eval_interval: int | None = None
    transformer: Any = None
    ours: str = "new"

    def lr(self) -> None:
        """Not a field."""


@dataclasses.dataclass
class Optimizer:
    bf16: bool = True
    lr: float = 1e-3
    eval_interval: int = 7


def configuration(**parts: Any) -> Any:
    return types.SimpleNamespace(
        model=Model(transformer=Inner()), optimizer=Optimizer(), comm_overlap=object(), **parts
    )


def test_an_option_in_several_sections() -> None:
    """It is read from the first that has a value, and set in all, also inside a model."""
    config = configuration()
    options: Any = Options(config)
    assert options.eval_interval == 7
    options.bf16 = False
    assert not config.optimizer.bf16
    assert not config.model.transformer.bf16
    assert options.lr == 1e-3


def test_options_with_another_name() -> None:
    config = configuration()
    options: Any = Options(config)
    assert (options.num_experts, options.untie_embeddings_and_output_weights) == (8, False)
    options.untie_embeddings_and_output_weights = True
    assert not config.model.share_embeddings_and_output_weights
    assert options.padded_vocab_size == 128


def test_a_name_that_nothing_is_known_about() -> None:
    """It is no default: another name may mean it."""
    options = Options(configuration())
    assert getattr(options, "moe_use_upcycling", 3) == 3
    with pytest.raises(TTraceError, match="moe_use_upcyclin:"):
        getattr(options, "moe_use_upcyclin", 3)


def test_the_position_in_the_data() -> None:
    options: Any = Options(configuration())
    assert options.iteration == 0
    state = types.SimpleNamespace(train_state=types.SimpleNamespace(step=5))
    options.follow(state)
    options.iteration += 1
    assert state.train_state.step == 6


def test_what_a_reference_has_not() -> None:
    config = configuration(ddp=types.SimpleNamespace(use_custom_fsdp=True))
    Options(config).reset_others()
    assert config.comm_overlap is None
    assert not config.ddp.use_custom_fsdp


def test_refused() -> None:
    config = configuration(dist=types.SimpleNamespace(use_decentralized_pg=True))
    with pytest.raises(TTraceError, match=r"dist\.use_decentralized_pg"):
        Options(config).require()


@pytest.mark.parametrize(
    ("more", "refused"),
    [
        ({"share_expert_adapters": False}, True),
        ({"experts_shared_outer_loras": True}, True),
        ({"share_expert_adapters": True, "experts_shared_outer_loras": False}, False),
        ({"share_expert_adapters": False, "target_modules": ["linear_qkv"]}, False),
        ({}, False),
    ],
)
def test_adapters_of_single_experts(more: dict[str, Any], refused: bool) -> None:
    """They see a part of the tokens; other adapters are checked, and so are models without any."""
    peft = types.SimpleNamespace(**{"target_modules": ["linear_qkv", "linear_fc1"], **more})
    options = Options(configuration(peft=peft))
    if refused:
        with pytest.raises(TTraceError, match=rf"peft\.{next(iter(more))}"):
            options.require()
    else:
        options.require()
    options.num_experts = None
    options.require()


def test_the_files_of_the_data(tmp_path: Path) -> None:
    """They count in a reference's identity, by their dates; indices beside them do not."""
    (tmp_path / "training.jsonl").touch()
    (tmp_path / "training.jsonl.idx.npy").touch()
    data = types.SimpleNamespace(blend=(["a", "b"], [0.5, 0.5]), dataset_root=str(tmp_path))
    options: Any = Options(configuration(dataset=data))
    assert options.data_path == ["a", "b", str(tmp_path / "training.jsonl")]


def test_a_field_of_ones_own() -> None:
    """It is kept, and named."""
    assert "model.ours" in Options(configuration()).unknown()


def test_a_known_field_with_another_default() -> None:
    """The class of a job's own model declares it again."""
    known: Any = dataclasses.make_dataclass(
        "Known", [("rope_scaling", bool, False)], module="megatron.bridge.models"
    )
    kind = dataclasses.make_dataclass("Own", [("rope_scaling", bool, True)], bases=(known,))
    assert Options(types.SimpleNamespace(model=kind())).unknown() == []


@pytest.mark.parametrize("package", ["megatron.bridge", "megatron.core", "megatron.training"])
def test_inherited_fields_are_known(package: str) -> None:
    """Bridge's classes inherit from Megatron's, whose fields are not a user's."""
    parent: Any = dataclasses.make_dataclass(
        "Parent", [("lr_of_parent", int, 0)], module=f"{package}.config"
    )
    kind = dataclasses.make_dataclass("Own", [("ours", int, 0)], bases=(parent,), module="script")
    assert Options(types.SimpleNamespace(scheduler=kind())).unknown() == ["scheduler.ours"]


@pytest.mark.bridge
@pytest.mark.parametrize("section", bridge_options.SECTIONS)
def test_fields_of_a_release_are_known(section: str) -> None:
    """No report names them as a user's own."""
    for kind in _classes(section):
        fields = {field.name: None for field in dataclasses.fields(kind)}
        one = object.__new__(kind)
        vars(one).update(fields)
        assert Options(types.SimpleNamespace(**{section: one})).unknown() == [], kind


def test_an_identity_has_every_field_by_its_option() -> None:
    names = vars(Options(configuration()))
    assert (names["num_experts"], names["vocab_size"]) == (8, 100)
    assert names["model.ours"] == "new"


def _classes(section: str) -> Iterator[type]:
    """Those that a section can have, as far as Bridge itself defines their fields."""
    cpu.activate()
    config: Any = importlib.import_module("megatron.bridge.training.config")
    container = {field.name: field for field in dataclasses.fields(config.ConfigContainer)}
    if section == "model":
        for module, names in {
            "gpt_provider": ("GPTModelProvider",),
            "mla_provider": ("MLAModelProvider",),
            "hybrid.hybrid_provider": ("HybridModelProvider",),
            "gpt.gpt_builder": ("GPTModelConfig",),
            "hybrid.hybrid_builder": ("HybridModelConfig",),
            "transformer_config": ("TransformerConfig", "MLATransformerConfig"),
        }.items():
            home = importlib.import_module(f"megatron.bridge.models.{module}")
            yield from (getattr(home, name) for name in names)
    elif section == "dataset":
        for name in ("GPTDatasetConfig", "MockGPTDatasetConfig", "GPTFIMDatasetConfig"):
            yield getattr(config, name)
        sft: Any = importlib.import_module("megatron.bridge.data.builders.gpt_sft")
        yield sft.GPTSFTDatasetConfig
    else:
        yield container[section].type


@pytest.mark.bridge
@pytest.mark.parametrize("section", bridge_options.SECTIONS)
def test_every_field_has_a_rule(section: str) -> None:
    """Of all of Bridge's own sub-configurations: it has a rule, or was looked at and is kept."""
    lacking = {
        field.name
        for kind in _classes(section)
        for field in dataclasses.fields(kind)
        if not has_rule(section, field.name)
        and field.name not in FIELDS["kept"].get(section, "").split()
    }
    assert not lacking


@pytest.mark.bridge
def test_every_section_has_a_decision() -> None:
    cpu.activate()
    config: Any = importlib.import_module("megatron.bridge.training.config")
    sections = {field.name for field in dataclasses.fields(config.ConfigContainer)}
    known_names = {*bridge_options.SECTIONS, *bridge_options.DROPPED, *bridge_options.OTHERS}
    assert sections - known_names == {"_checkpoint_load_required"}


def _read() -> set[str]:
    """The names of options that this package reads."""
    names = {*SINGLE_DEVICE, *QUIET}
    home = Path(megatron_ttrace.__file__).parent
    for path in home.rglob("*.py"):
        if {"evaluation", "cli"} & {*path.relative_to(home).parts}:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and _is_arguments(node.value):
                names.add(node.attr)
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in (
                *("getattr", "hasattr", "setattr"),
            ):
                owner, name = node.args[:2]
                if _is_arguments(owner) and isinstance(name, ast.Constant):
                    names.add(str(name.value))
    return names & {*ROLES, *SINGLE_DEVICE, *QUIET}


def _is_arguments(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name in ("args", "_args")


@pytest.mark.bridge
def test_no_name_is_read_with_a_silent_default() -> None:
    """Each is a field, has another name, follows from others, or is known to be absent."""
    fields = {
        field.name
        for section in bridge_options.SECTIONS
        for kind in _classes(section)
        for field in dataclasses.fields(kind)
    }
    known_names = fields | {*RENAMED, *bridge_options._DERIVED}
    absent = {*FIELDS["absent"].split()}
    assert _read() - known_names - absent == set()
    assert not absent & known_names


@pytest.mark.bridge
def test_renamed_fields_exist() -> None:
    for place in RENAMED.values():
        section, _, name = place.partition(".")
        fields = (dataclasses.fields(kind) for kind in _classes(section))
        assert name in {field.name for each in fields for field in each}


@pytest.mark.parametrize(
    ("place", "known"),
    [
        ("model.tensor_model_parallel_size", True),
        ("model.num_layers_in_first_pipeline_stage", True),
        ("ddp.average_in_collective", True),
        ("dist.use_decentralized_pg", True),
        ("logger.mlflow_experiment", True),
        ("model.ours", False),
    ],
)
def test_fields_with_a_rule(place: str, known: bool) -> None:
    assert has_rule(*place.split(".")) is known
