# SPDX-License-Identifier: Apache-2.0
"""A GPU command line becomes one that a CPU can run, and says what that took away."""

import copy
import importlib
import os
import sys
from argparse import Namespace

import pytest
import torch

from megatron_ttrace.cpu import adapt_arguments, apex, arguments, banner, collectives
from megatron_ttrace.trace.errors import TTraceError

pytest.importorskip("megatron.training")


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    """As where TransformerEngine is emulated, and no process-wide change by a test."""
    monkeypatch.setattr(arguments, "_have_transformer_engine", lambda: True)
    monkeypatch.setattr(arguments.te, "emulated", lambda: True)
    monkeypatch.setattr(arguments, "_have_fused_rope", lambda: True)
    monkeypatch.setattr(arguments.helpers_cpp, "skip_compilation", lambda: True)
    monkeypatch.setattr(arguments, "_skip_warmup", lambda: None)
    monkeypatch.setattr(apex, "choose_local_norm", lambda normalization: None)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def test_a_script_that_blocks_a_package(monkeypatch):
    """``None`` among the modules keeps it from being imported, and has no functions."""
    monkeypatch.undo()
    utils = importlib.import_module("megatron.core.datasets.utils")
    monkeypatch.setattr(utils, "compile_helpers", lambda: None)
    monkeypatch.setitem(sys.modules, "blocked", None)
    assert arguments.helpers_cpp.skip_compilation()
    assert utils.compile_helpers is arguments.helpers_cpp._compile_nothing


@pytest.fixture
def parse(monkeypatch):
    """Megatron's own parser, so that names and defaults are the real ones."""
    from megatron.training.arguments import parse_args

    def run(*words: str) -> Namespace:
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "--num-layers", "2", *words])
        return parse_args()

    return run


def test_a_plain_command_line(parse):
    args = parse()
    assert set(adapt_arguments(args)) == {
        "NCCL",
        "gradient accumulation fusion",
        "data-loader workers",
    }
    assert args.distributed_backend == "gloo"
    assert args.transformer_impl == "transformer_engine"
    assert not args.gradient_accumulation_fusion
    assert args.no_persist_layer_norm
    assert args.num_workers == 0
    # They run as they are, and bias + GELU computes another GELU than the unfused code.
    assert args.bias_gelu_fusion
    assert args.bias_swiglu_fusion
    assert args.bias_dropout_fusion


def test_a_command_line_for_the_cpu_loses_nothing(parse):
    args = parse(
        *"--distributed-backend gloo --transformer-impl local --attention-backend unfused".split(),
        *"--no-gradient-accumulation-fusion --no-masked-softmax-fusion --num-workers 0".split(),
        "--no-persist-layer-norm",
    )
    assert adapt_arguments(args) == []


def test_padding_without_a_kernel(parse, monkeypatch):
    """Experimental code pads routing maps with a kernel of Triton, which has no CPU."""
    names = ("fusions.fused_pad_routing_map", "transformer.moe.token_dispatcher")
    modules = [importlib.import_module(f"megatron.core.{name}") for name in names]
    for module in modules:
        monkeypatch.setattr(module, "fused_pad_routing_map", module.fused_pad_routing_map)
    adapt_arguments(parse("--enable-experimental", "--moe-permute-fusion"))
    chosen = torch.tensor([[1, 0], [1, 0], [1, 1], [0, 0], [0, 0]], dtype=torch.bool)
    before = chosen.clone()
    for module in modules:
        padded = module.fused_pad_routing_map(chosen, 2)
        assert padded.tolist() == [[1, 1], [1, 0], [1, 1], [1, 0], [0, 0]]
        assert padded.dtype == torch.int32
    assert torch.equal(chosen, before)


@pytest.mark.parametrize(
    ("given", "flag", "set_to"),
    [
        ("32", "--bf16", "1"),  # of a job for Blackwell
        (None, "--bf16", "1"),
        (None, "--use-torch-fsdp2", None),
        (None, "--use-megatron-fsdp", None),
    ],
)
def test_connections(given, flag, set_to, parse, monkeypatch):
    """Tensor parallelism needs a single queue, which both FSDPs refuse."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    if given is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", given)
    adapt_arguments(parse("--tensor-model-parallel-size", "2", flag))
    assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == set_to


def test_twice_is_once(parse):
    """Megatron's fault-tolerance start parses the command line a second time."""
    args = parse("--swiglu", "--position-embedding-type", "rope")
    adapt_arguments(args)
    again = copy.deepcopy(args)
    assert adapt_arguments(again) == []
    assert vars(again) == vars(args)


@pytest.mark.parametrize(
    ("words", "lost", "is_named"),
    [
        ("--multi-latent-attention", "RoPE fusion", True),
        ("--cuda-graph-impl local", "CUDA graphs", True),
        ("--dsa-kernel-backend cudnn", "kernels of sparse attention", True),
        ("--num-experts 4 --transformer-impl local", "bias and GELU fusion", True),
        ("--num-experts 4 --moe-token-dispatcher-type flex", "flex token dispatcher", True),
        ("--use-transformer-engine-op-fuser", "operation fuser", True),
        ("--transformer-impl local", "masked softmax fusion", True),
        ("--transformer-impl local", "persistent layer norm", True),
        ("--transformer-impl local --attention-backend flash", "flash and fused attention", True),
        # The user would not have had it.
        ("--attention-backend flash", "flash and fused attention", False),
        ("", "masked softmax fusion", False),
        ("", "persistent layer norm", False),
        ("--tp-comm-overlap", "tensor-parallel communication overlap", False),
        ("--position-embedding-type rope", "RoPE fusion", False),
        ("--num-experts 4 --swiglu --transformer-impl local", "bias and GELU fusion", False),
        ("--transformer-impl local", "flash and fused attention", False),
        ("--transformer-impl local --normalization RMSNorm", "persistent layer norm", False),
    ],
)
def test_what_is_lost_is_named(parse, words, lost, is_named):
    changes = adapt_arguments(parse(*words.split()))
    assert (lost in changes) is is_named
    assert len(changes) == len(set(changes))


@pytest.mark.parametrize(
    ("words", "switched_off"),
    [
        ("--num-experts 4 --moe-token-dispatcher-type flex", ("flex token dispatcher",)),
        ("--num-experts 4 --moe-token-dispatcher-type alltoall --swiglu", ()),
        ("--cpu-offloading-num-layers 1 --use-sharp", ("SHARP", "activation offload")),
    ],
)
def test_what_a_pass_says_nothing_about(parse, words, switched_off):
    """What was asked for; what an earlier job lost is forgotten."""
    adapt_arguments(parse(*words.split()))
    assert arguments.switched_off() == switched_off


def test_a_real_engine_on_a_cpu(parse, monkeypatch):
    """It does not overlap communication, and attention has to be unfused."""
    monkeypatch.setattr(arguments.te, "emulated", lambda: False)
    monkeypatch.setattr(arguments, "_have_fused_rope", lambda: False)
    words = "--tp-comm-overlap --position-embedding-type rope --attention-backend flash"
    args = parse(*words.split())
    lost = {"tensor-parallel communication overlap", "RoPE fusion", "flash and fused attention"}
    assert lost < set(adapt_arguments(args))
    assert args.attention_backend.name == "unfused"


def test_an_engine_that_megatron_cannot_import(parse, monkeypatch):
    """Megatron would fall back to local layers, which are another model."""
    monkeypatch.setattr(arguments, "_have_transformer_engine", lambda: False)
    with pytest.raises(TTraceError, match="cannot import the TransformerEngine"):
        adapt_arguments(parse())


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("--context-parallel-size 2", "--context-parallel-size"),
        ("--fp8-format hybrid", "--fp8-format"),
        ("--multi-latent-attention", "--multi-latent-attention"),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel --normalization RMSNorm",
            "--sequence-parallel with --normalization RMSNorm",
        ),
    ],
)
def test_what_local_layers_cannot_do_is_refused(parse, words, option):
    args = parse(*words.split())
    adapt_arguments(args)
    args.transformer_impl = "local"
    with pytest.raises(TTraceError, match=f"^{option} needs --transformer-impl"):
        adapt_arguments(args)


def test_another_activation_is_refused(parse):
    """The engine's GELU is the tanh approximation, Megatron's own the exact one."""
    args = parse()
    args.use_te_activation_func = True
    with pytest.raises(TTraceError, match="--use-te-activation-func"):
        adapt_arguments(args)


def test_other_releases_lack_arguments():
    """Nothing is invented that the installed Megatron does not know."""
    args = Namespace(tensor_model_parallel_size=1, distributed_backend="nccl")
    assert adapt_arguments(args) == ["NCCL"]
    assert set(vars(args)) == {"tensor_model_parallel_size", "distributed_backend"}


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ("nccl", "gloo"),
        ("cpu:gloo,cuda:nccl", "gloo"),
        ("gloo", "gloo"),
        ("fake", "fake"),
        (None, None),
    ],
)
def test_backends(backend, expected):
    assert collectives.gloo(backend) == expected


def test_banner_is_one_line_that_names_everything():
    line = banner(["NCCL", "CUDA graphs"])
    assert "\n" not in line
    assert line.endswith("switched off: NCCL, CUDA graphs")
