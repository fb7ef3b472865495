# SPDX-License-Identifier: Apache-2.0
"""Names of the whole model, from a stage's, a chunk's or an expert rank's numbering."""

import pytest
import torch
from torch import nn

from megatron_ttrace.capture.step import TracedModel
from megatron_ttrace.mcore.names import called_in, canonical_names, stage_flag, unwrap
from megatron_ttrace.placement.mesh import SINGLE
from megatron_ttrace.trace.records import ROOT
from tests.capture.recorder import Block


class Stage(nn.Module):
    """A pipeline stage that holds the third and the fourth layer."""

    def __init__(self):
        super().__init__()
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList([Block(2, 3), Block(2, 4)])
        self.decoder.final_layernorm = nn.LayerNorm(2)


def test_layers_are_numbered_over_all_stages():
    """Local 0 and 1 are the model's 2 and 3; module, parameters and all."""
    stage = Stage()
    names = canonical_names(stage)
    assert names.modules["decoder.layers.2.first"] is stage.decoder.layers[0].first
    assert names.parameters["decoder.layers.3.second.bias"] is stage.decoder.layers[1].second.bias
    assert "decoder.layers.0" not in names.modules
    assert "decoder.final_layernorm" in names.modules
    assert names.modules[ROOT] is stage
    assert len(names.parameters) == len(list(stage.parameters()))


def test_spans_are_what_depends_on_the_stage():
    """The model and its block of layers, not the layers."""
    assert canonical_names(Stage()).spans == {"", "decoder"}
    # A chunk without layers has the embedding or the loss only.
    stage = Stage()
    stage.decoder.layers = nn.ModuleList()
    assert canonical_names(stage).spans == {"", "decoder"}


def test_parts_of_a_layer_in_a_list():
    """Megatron gives attentions, routers and the like the number of their layer."""
    stage = Stage()
    stage.decoder.layers[0].branches = nn.ModuleList([Block(2, 3), Block(2, 3)])
    names = canonical_names(stage)
    branches = "decoder.layers.2.branches"
    assert names.modules[f"{branches}.0"] is stage.decoder.layers[0].branches[0]
    assert names.modules[f"{branches}.1"] is stage.decoder.layers[0].branches[1]
    assert len(names.parameters) == len(list(stage.parameters()))
    assert names.spans == {"", "decoder"}


def test_a_model_in_another_is_a_stage_of_it():
    """What enters and leaves it depends on the stage, which only itself may say."""
    around = nn.Module()
    around.gpt = Stage()
    around.gpt.pre_process = around.gpt.post_process = False
    around.gpt.decoder.layers[0].inner = Stage()
    names = canonical_names(around)
    inner = "gpt.decoder.layers.2.inner.decoder"
    assert names.spans == {"", "gpt", "gpt.decoder", inner}
    assert not stage_flag(around, "post_process")
    assert stage_flag(nn.Linear(2, 2), "post_process")


def test_a_model_in_another():
    """Both are there, each with what it holds itself."""
    around = nn.Module()
    around.model = nn.BatchNorm1d(2)
    around.norm = nn.LayerNorm(2)
    names = canonical_names(around)
    assert names.modules[ROOT] is around
    assert len(names.modules) == len(list(around.modules()))
    model = TracedModel([around], [names], None, SINGLE)
    assert len(list(model.buffers())) == len(list(around.buffers()))


def test_layers_between_others():
    """No two modules of a list have one name."""
    stage = Stage()
    stage.decoder.layers = nn.ModuleList([Block(2, 1), nn.Linear(2, 2), Block(2, 2)])
    names = canonical_names(stage)
    assert len(names.modules) == len(list(stage.modules()))


def test_experts_are_numbered_over_all_ranks():
    """Sequential experts, of the rank that starts with the model's expert 4."""
    stage = Stage()
    stage.decoder.layers[0].mlp = nn.Module()
    stage.decoder.layers[0].mlp.experts = nn.Module()
    stage.decoder.layers[0].mlp.experts.local_experts = nn.ModuleList(
        [nn.Linear(2, 2), nn.Linear(2, 2)]
    )
    names = canonical_names(stage, expert_offset=4)
    experts = "decoder.layers.2.mlp.experts.local_experts"
    assert {n for n in names.modules if n.startswith(f"{experts}.")} == {
        f"{experts}.4",
        f"{experts}.5",
    }
    assert f"{experts}.5.bias" in names.parameters


def test_grouped_experts_are_numbered_by_weight():
    """A grouped linear keeps all experts of a rank as weight0, weight1, ..."""
    stage = nn.Module()
    stage.experts = nn.Module()
    stage.experts.linear_fc1 = nn.Module()
    for leaf in ("weight0", "weight1", "bias0"):
        stage.experts.linear_fc1.register_parameter(leaf, nn.Parameter(torch.zeros(2)))
    stage.other = nn.Module()
    stage.other.weight0 = nn.Parameter(torch.zeros(2))
    assert set(canonical_names(stage, expert_offset=8).parameters) == {
        "experts.linear_fc1.weight8",
        "experts.linear_fc1.weight9",
        "experts.linear_fc1.bias8",
        "other.weight0",
    }


@pytest.mark.parametrize("tied", [True, False])
def test_the_last_stages_copy_of_a_tied_embedding(tied):
    """Megatron marks it ``shared_embedding``: it is a replica of the embedding."""
    stage = nn.Module()
    stage.output_layer = nn.Linear(2, 4, bias=False)
    stage.output_layer.weight.shared_embedding = tied
    name = "embedding.word_embeddings.weight" if tied else "output_layer.weight"
    around = nn.Module()
    around.language_model = stage
    assert f"language_model.{name}" in canonical_names(around).parameters
    assert list(canonical_names(stage).parameters) == [name]


class LastStage(nn.Module):
    """A last stage with multi-token prediction: it embeds shifted tokens itself."""

    def __init__(self, tied):
        super().__init__()
        self.pre_process, self.mtp_process = False, True
        self.share_embeddings_and_output_weights = tied
        self.embedding = nn.Module()
        self.embedding.word_embeddings = nn.Embedding(4, 2)
        self.output_layer = nn.Linear(2, 4, bias=False)


@pytest.mark.parametrize(
    ("layer", "module", "name"),
    [
        ("mtp.layers.0", "embedding.norm", "embedding.norm#mtp/layers/0"),
        ("mtp.layers.0", "mtp.layers.0.norm", "mtp.layers.0.norm"),
        (ROOT, "embedding.norm", "embedding.norm"),
    ],
)
def test_what_a_layer_calls_outside_of_itself(layer, module, name):
    """Also what precedes the layers of one stage follows those of another."""
    assert called_in(layer, module) == name


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_nobody_reads(tied):
    """With tied weights such a stage's head uses the embedding, and its own weight is left over."""
    names = canonical_names(LastStage(tied))
    assert names.unused == (("output_layer.weight",) if tied else ())
    assert ("output_layer.weight" in names.parameters) is not tied


def test_digits_that_number_no_layers_stay():
    """An ordinary ``Sequential``, and numbers that are no integers."""
    stage = nn.Module()
    stage.mlp = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    stage.mlp[1].layer_number = "3"
    assert {"mlp.0", "mlp.1"} <= set(canonical_names(stage).modules)


def test_buffers_and_shared_modules():
    """Buffers by name; a module that is held twice has its first name only."""
    stage = nn.Module()
    stage.norm = nn.BatchNorm1d(2)
    stage.again = stage.norm
    names = canonical_names(stage)
    assert set(names.buffers) == {
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }
    assert set(names.modules) == {ROOT, "norm"}
    assert set(names.parameters) == {"norm.weight", "norm.bias"}


def test_megatrons_wrappers_are_taken_off():
    """DDP around mixed precision around the model, by what Megatron's wrappers derive from."""

    class Float16Module(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    base = type("_BaseDataParallel", (Float16Module,), {})
    inner = nn.Linear(2, 2)
    for name in ("DistributedDataParallel", "FullyShardedDataParallelV1"):
        assert unwrap(type(name, (base,), {})(Float16Module(inner))) is inner
    assert unwrap(inner) is inner
    sharded = Float16Module(inner)
    sharded.__class__ = type("FSDPFloat16Module", (Float16Module,), {})
    assert unwrap(sharded) is inner


def test_the_installed_megatrons_wrappers_are_known():
    """All ways to parallelise a chunk over data have one base."""
    from megatron.core import distributed

    wrappers = [
        value
        for name, value in vars(distributed).items()
        if name.endswith("DataParallel") and isinstance(value, type)
    ]
    assert len(wrappers) >= 2
    assert all(
        any(base.__name__ == "_BaseDataParallel" for base in wrapper.__mro__)
        for wrapper in wrappers
    )


def test_layers_that_a_fork_wraps_or_numbers_itself():
    """The number is that of the only module inside; transformers' begins with 0."""
    stage = Stage()
    wrapped = (nn.ModuleDict({"layer": layer}) for layer in stage.decoder.layers)
    stage.decoder.layers = nn.ModuleList(wrapped)
    stage.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    for number, block in enumerate(stage.blocks):
        block.layer_idx = 6 + number
    names = canonical_names(stage)
    layer = stage.decoder.layers[1]["layer"]
    assert names.modules["decoder.layers.3.layer.first"] is layer.first
    assert names.modules["blocks.7"] is stage.blocks[1]
    assert names.layers >= {"decoder.layers.2", "decoder.layers.3", "blocks.6"}


@pytest.mark.parametrize("holder", ["", "decoder"])
def test_a_list_with_a_module_for_each_layer(holder):
    """Its numbers are those of the layers of the stage; a list of another length has its own."""
    stage = Stage()
    owner = stage.get_submodule(holder)
    owner.gates = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    owner.scales = nn.ParameterList([torch.ones(1), torch.ones(1)])
    owner.streams = nn.ModuleList([nn.Linear(2, 2)] * 3)
    names, prefix = canonical_names(stage), holder and f"{holder}."
    assert names.modules[f"{prefix}gates.3"] is owner.gates[1]
    assert names.parameters[f"{prefix}gates.2.weight"] is owner.gates[0].weight
    assert names.parameters[f"{prefix}scales.3"] is owner.scales[1]
    assert f"{prefix}streams.0" in names.modules
    assert len(names.parameters) == len(list(stage.parameters()))


@pytest.mark.parametrize(("count", "first"), [(2, "4"), (8, "0")])
def test_a_forks_own_list_of_experts(count, first):
    """Those of the rank that has experts 4 and 5 of 8, or all of them."""
    stage = Stage()
    stage.decoder.layers[0].mlp = nn.Module()
    stage.decoder.layers[0].mlp.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(count))
    names = canonical_names(stage, expert_offset=4)
    expert = stage.decoder.layers[0].mlp.experts[0]
    assert names.modules[f"decoder.layers.2.mlp.experts.{first}"] is expert


def test_names_with_the_sign_of_runs():
    """Modules of one beginning must not be taken for runs of one module."""
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "a#1": nn.Linear(2, 2)})
    assert [*canonical_names(model).parameters][::2] == ["a.weight", "a%231.weight"]


def test_modules_of_torchscript():
    """No hook can be registered; their parameters are compared."""
    model = nn.Sequential(torch.jit.script(nn.BatchNorm1d(2)), nn.Linear(2, 2))
    names = canonical_names(model)
    assert [*names.modules] == [ROOT, "1"]
    assert [*names.parameters] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert not [*TracedModel([model], [names], None, SINGLE).buffers()]
