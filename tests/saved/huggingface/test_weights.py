# SPDX-License-Identifier: Apache-2.0
"""The table of weights, against a converter written by hand and transformers' own modules."""

import json
import math
import os
import re
import subprocess
import sys

import pytest
import torch

from megatron_ttrace.saved.huggingface import families, weights
from megatron_ttrace.trace.errors import TTraceError
from tests.saved.huggingface import made
from tests.saved.huggingface.jobs import BESIDE, needs_transformers

CONFIGS = [*made.CONFIGS.values(), made.BIASED, made.WHOLE_QUERIES]


@pytest.mark.parametrize("config", CONFIGS, ids=made.name)
def test_both_ways(config):
    """The table converts as the plain converter does, and back to the same weights."""
    state = made.files(config)
    ours = made.converted(config, state)
    family = families.family_of(config, weights_only=True)
    for name, data in weights.megatron_weights(family, config, state, ours).items():
        assert torch.equal(data, ours[name]), name
    back = weights.load_weights(family, config, ours)
    again = weights.megatron_weights(family, config, back, ours)
    assert again.keys() == ours.keys()
    assert all(torch.equal(data, ours[name]) for name, data in again.items())


SHAPES = """
import json, sys, torch, transformers
for config in json.load(sys.stdin):
    config = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    print(json.dumps({name: data.shape for name, data in model.state_dict().items()}))
"""


@pytest.mark.nightly
@needs_transformers
def test_transformers_names():
    """In memory, transformers' models have exactly these names and shapes."""
    done = subprocess.run(
        [sys.executable, "-c", SHAPES],
        input=json.dumps(CONFIGS),
        env={**os.environ, "PYTHONPATH": BESIDE},
        capture_output=True,
        text=True,
        check=True,
    )
    for config, line in zip(CONFIGS, done.stdout.splitlines(), strict=True):
        state = weights.load_weights(
            families.family_of(config, weights_only=True),
            config,
            made.converted(config, made.files(config)),
        )
        assert {name: list(data.shape) for name, data in state.items()} == json.loads(line)


def test_names_of_megatron():
    """Norms of their own and in linear layers, grouped and sequential experts are the same."""
    config = made.CONFIGS["qwen3_moe"]
    ours = made.converted(config, made.files(config))
    family = families.family_of(config, weights_only=True)
    expected = weights.load_weights(family, config, ours)
    expert = re.compile(r"experts\.experts\.(\d+)\.(\w+)\.weight")
    for words in (r"experts.local_experts.\1.\2.weight", r"experts.\2.weight\1"):
        named = {
            expert.sub(words, name)
            .replace("linear_qkv.layer_norm_weight", "!")
            .replace("self_attention.!", "input_layernorm.weight"): data
            for name, data in ours.items()
        }
        state = weights.load_weights(family, config, named)
        assert all(torch.equal(data, expected[name]) for name, data in state.items())


def test_padding():
    """Rows appended to the vocabulary are cut off, or kept for a model of this size."""
    config = made.CONFIGS["llama"]
    state = made.files(config)
    ours = made.converted(config, state)
    name = "embedding.word_embeddings.weight"
    for key in (name, "output_layer.weight"):
        ours[key] = torch.cat([ours[key], torch.ones(2, 16)])
    family = families.family_of(config, weights_only=True)
    cut = weights.load_weights(family, config, ours)["model.embed_tokens.weight"]
    assert torch.equal(cut, state["model.embed_tokens.weight"])
    kept = weights.load_weights(family, {**config, "vocab_size": 32}, ours)
    assert torch.equal(kept["model.embed_tokens.weight"], ours[name])


def test_tied_head():
    """A head that transformers ties is accepted if it is the embedding, NaN in it or not."""
    config = made.CONFIGS["qwen2"]
    ours = made.converted(config, made.files(config))
    family = families.family_of(config, weights_only=True)
    ours["embedding.word_embeddings.weight"][0] = math.nan
    ours["output_layer.weight"] = ours["embedding.word_embeddings.weight"].clone()
    weights.load_weights(family, config, ours)
    ours["output_layer.weight"][3] += 1
    with pytest.raises(TTraceError, match=r"which config\.json ties"):
        weights.load_weights(family, config, ours)


def test_what_is_refused():
    """One line names what is not supported, absent, or has no counterpart."""
    config = made.CONFIGS["llama"]
    ours = made.converted(config, made.files(config))
    family = families.family_of(config, weights_only=True)
    for changed, match in (
        ({"model_type": "gpt2"}, "'gpt2' is not supported"),
        ({"model_type": "qwen2_moe"}, "of qwen2_moe only weights are compared"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized weights"),
    ):
        with pytest.raises(TTraceError, match=match):
            families.family_of({**config, **changed})
    for changed, match in (
        ({"num_hidden_layers": None}, "num_hidden_layers is None, not a number"),
        ({"num_hidden_layers": 1 << 22}, "4194304 layers with 0 experts are too many"),
        ({"mlp_only_layers": 3, "num_experts": 2}, "mlp_only_layers is 3, not a list"),
        (
            {"decoder_sparse_step": 0, "num_experts": 2},
            r"no counterpart of Megatron's decoder.layers.0.mlp",
        ),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3"),
        ({"hybrid_override_pattern": "MX"}, "no kind of layers 'X'"),
        ({"num_hidden_layers": 3}, r"no counterpart of model.layers.2.*6 such tensors"),
        ({"num_hidden_layers": 1}, r"no counterpart of Megatron's decoder.layers.1.*6 such"),
        ({"head_dim": 8}, "linear_qkv.weight has 32 rows, by config.json it needs 64"),
    ):
        with pytest.raises(TTraceError, match=match):  # noqa: PT012
            weights.require_complete(family, {**config, **changed}, ours)
            weights.load_weights(family, {**config, **changed}, ours)


def test_options_of_megatron():
    """What Megatron's model lacks is named with the option that adds it, if there is one."""
    for name, lacking, option in (
        ("qwen2", "linear_qkv.bias", ": train it with --add-qkv-bias"),
        ("qwen3", "q_layernorm.weight", ": train it with --qk-layernorm"),
        ("llama", "output_layer.weight", ": train it with --untie-embeddings-and-output-weights"),
        ("llama", "linear_proj.weight", "such tensors)"),
    ):
        config = made.CONFIGS[name]
        ours = [x for x in made.converted(config, made.files(config)) if not x.endswith(lacking)]
        with pytest.raises(TTraceError) as error:
            weights.require_complete(families.FAMILIES[name], config, ours)
        assert str(error.value).endswith(option)
