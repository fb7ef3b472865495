# SPDX-License-Identifier: Apache-2.0
"""A command line written for GPUs, adapted so that it means the same on a CPU.

Only what cannot run is switched off, and only where the arithmetic stays that of the model: a fused
kernel becomes Megatron's unfused code for the same formula, an overlap becomes its sequential
order, NCCL becomes gloo. Fusions that Megatron writes in PyTorch and hands to ``torch.compile``
(bias + GELU, bias + SwiGLU, bias + dropout, the native cross entropy) run on a CPU as they are and
stay on: bias + GELU is the tanh approximation, so switching it off would change the model.

Options whose meaning would be lost are refused with the name of what is needed.
"""

import importlib
import os
import sys
from typing import Any

from megatron_ttrace.cpu import apex, helpers_cpp, offload, te
from megatron_ttrace.cpu.collectives import gloo
from megatron_ttrace.trace.errors import TTraceError

_USUAL = frozenset(
    {
        *("NCCL", "NCCL configuration", "stream priorities", "data-loader workers", "NVTX ranges"),
        *("GPU self-test", "energy log", "persistent layer norm", "masked softmax fusion"),
        *("gradient accumulation fusion", "fused scaling of gradients", "RoPE fusion"),
        "bias and GELU fusion",
    }
)
"""What Megatron has without being asked for it, or what no number depends on."""
_asked: list[str] = []


class _Adapter:
    """Sets arguments and remembers which of the user's choices that took away."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.changes: list[str] = []

    def get(self, name: str) -> Any:
        """Value of an argument that not every release of Megatron has."""
        return getattr(self.args, name, None)

    def switch_off(self, name: str, label: str, off: Any = False, when: bool = True) -> None:
        """Set ``name`` to ``off``; report ``label`` when that changed what the user has."""
        if not hasattr(self.args, name) or self.get(name) == off:
            return
        setattr(self.args, name, off)
        if when and label not in self.changes:
            self.changes.append(label)


def _have_transformer_engine() -> bool:
    # Megatron's own answer, after it tried the import: the package can be installed and still
    # not import its PyTorch part.
    from megatron.core.extensions import transformer_engine

    return bool(transformer_engine.HAVE_TE)


def _have_fused_rope() -> bool:
    from megatron.core.models.common.embeddings import rope_utils

    return getattr(rope_utils, "fused_apply_rotary_pos_emb", None) is not None


def _refuse_for_local_layers(adapter: _Adapter) -> None:
    """Refuse what Megatron's local layers would fail at without naming the option."""
    cut = adapter.get("sequence_parallel") and adapter.get("tensor_model_parallel_size") > 1
    asked = {
        "--context-parallel-size": (adapter.get("context_parallel_size") or 1) > 1,
        "--fp8-format": adapter.get("fp8"),
        "--fp4-format": adapter.get("fp4"),
        "--multi-latent-attention": adapter.get("multi_latent_attention"),
        "--sequence-parallel with --normalization RMSNorm": (
            cut and adapter.get("normalization") == "RMSNorm"
        ),
    }
    options = [option for option, value in asked.items() if value]
    if options:
        raise TTraceError(f"{', '.join(options)} needs --transformer-impl transformer_engine")


def _adapt_operations(adapter: _Adapter) -> None:
    """The emulated TransformerEngine has no operation fuser (``te/names.py``)."""
    if adapter.get("use_te_activation_func"):
        # Its GELU is the tanh approximation, Megatron's own the exact one: another model.
        raise TTraceError(
            "--use-te-activation-func needs a real TransformerEngine: drop it for this check"
        )
    adapter.switch_off("use_transformer_engine_op_fuser", "operation fuser")
    adapter.switch_off("fused_residual_rmsnorm", "fused residual RMSNorm")


def _adapt_layers(adapter: _Adapter) -> None:
    if not _have_transformer_engine():
        raise TTraceError(
            "Megatron cannot import the TransformerEngine that is installed: install the release "
            "that it was built with, or uninstall it, and it is emulated"
        )
    if te.emulated():
        _adapt_operations(adapter)
    if adapter.get("transformer_impl") == "local":
        _refuse_for_local_layers(adapter)
    wanted_te = adapter.get("transformer_impl") == "transformer_engine"
    _adapt_norms(adapter, wanted_te)
    _adapt_attention(adapter, wanted_te)
    _adapt_experts(adapter)


def _adapt_norms(adapter: _Adapter, wanted_te: bool) -> None:
    layer_norm = adapter.get("normalization") == "LayerNorm"
    # TransformerEngine's layer norm has no such switch: only local layers lose the kernel.
    adapter.switch_off(
        "no_persist_layer_norm",
        "persistent layer norm",
        True,
        when=layer_norm and not wanted_te,
    )
    apex.choose_local_norm(adapter.get("normalization"))


def _adapt_experts(adapter: _Adapter) -> None:
    gelu = not (adapter.get("swiglu") or adapter.get("quick_geglu"))
    if adapter.get("num_experts") and gelu and adapter.get("transformer_impl") == "local":
        # Experts computed one after the other refuse this fusion.
        adapter.switch_off("bias_gelu_fusion", "bias and GELU fusion")
    if adapter.get("enable_experimental") and adapter.get("moe_permute_fusion"):
        _pad_without_kernel()


def _pad_without_kernel() -> None:
    """Let Megatron pad routing maps with its own unfused code: the fused kernel needs Triton."""
    import torch
    from megatron.core.transformer.moe import moe_utils

    def fused_pad_routing_map(routing_map: torch.Tensor, pad_multiple: int) -> torch.Tensor:
        """As the kernel: a map of integers, and not in place."""
        padded: torch.Tensor = moe_utils.pad_routing_map(
            routing_map.to(torch.int32, copy=True), pad_multiple
        )
        return padded

    for name in ("fusions.fused_pad_routing_map", "transformer.moe.token_dispatcher"):
        module: Any = importlib.import_module(f"megatron.core.{name}")
        module.fused_pad_routing_map = fused_pad_routing_map


def _adapt_attention(adapter: _Adapter, wanted_te: bool) -> None:
    from megatron.core.transformer.enums import AttnBackend

    # With TransformerEngine, some layers of Megatron-Bridge have Megatron's own attention.
    adapter.switch_off("masked_softmax_fusion", "masked softmax fusion", when=not wanted_te)
    if wanted_te and te.emulated():
        # Its attention is one function, whatever backend is asked for.
        return
    backend = adapter.get("attention_backend")
    if backend not in (AttnBackend.unfused, AttnBackend.local):
        adapter.switch_off(
            "attention_backend",
            "flash and fused attention",
            AttnBackend.unfused,
            when=wanted_te or backend is not AttnBackend.auto,
        )
    adapter.switch_off("use_flash_attn", "flash and fused attention")


def _adapt_communication(adapter: _Adapter) -> None:
    args = adapter.args
    if gloo(adapter.get("distributed_backend")) != adapter.get("distributed_backend"):
        adapter.switch_off("distributed_backend", "NCCL", "gloo")
    adapter.switch_off("pipeline_model_parallel_comm_backend", "NCCL", None)
    if not te.emulated():
        adapter.switch_off("tp_comm_overlap", "tensor-parallel communication overlap")
    adapter.switch_off("nccl_ub", "NCCL user buffers")
    adapter.switch_off("fsdp_manual_registration", "NCCL user buffers")
    adapter.switch_off("use_sharp", "SHARP")
    # NCCL's "scale, then sum" in one reduction; gloo scales first and then sums.
    of_megatron = bool(adapter.get("use_megatron_fsdp"))
    adapter.switch_off("gradient_reduce_div_fusion", "fused scaling of gradients", when=of_megatron)
    adapter.switch_off("nccl_communicator_config_path", "NCCL configuration", None)
    adapter.switch_off("use_ring_exchange_p2p", "ring exchange")
    adapter.switch_off("symmetric_ar_type", "symmetric-memory all-reduce", None)
    adapter.switch_off("high_priority_stream_groups", "stream priorities", [])
    if adapter.get("moe_token_dispatcher_type") == "flex":
        # DeepEP and its kin move the same tokens as the all-to-all dispatcher.
        adapter.switch_off("moe_token_dispatcher_type", "flex token dispatcher", "alltoall")
        adapter.switch_off("moe_enable_deepep", "flex token dispatcher")
    spread = args.tensor_model_parallel_size > 1 or (adapter.get("context_parallel_size") or 1) > 1
    if spread and not (of_megatron or adapter.get("use_torch_fsdp2")):  # which refuse it
        # Megatron asserts this on anything older than Blackwell, whose jobs have other numbers. A
        # CPU has no such queue.
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"


def _adapt_kernels(adapter: _Adapter) -> None:
    if not adapter.get("defer_embedding_wgrad_compute"):  # which needs it
        adapter.switch_off("gradient_accumulation_fusion", "gradient accumulation fusion")
    rotary = adapter.get("position_embedding_type") in ("rope", "yarn", "mrope") or any(
        adapter.get(name) for name in ("use_rotary_position_embeddings", "multi_latent_attention")
    )
    if not _have_fused_rope() or adapter.get("multi_latent_attention"):
        adapter.switch_off("apply_rope_fusion", "RoPE fusion", when=rotary)
    for name in ("enable_cuda_graph", "external_cuda_graph", "optimizer_cuda_graph"):
        adapter.switch_off(name, "CUDA graphs")
    for name in ("te_rng_tracker", "use_te_rng_tracker"):
        # The same numbers, from states that graphs can read.
        adapter.switch_off(name, "random states for CUDA graphs", when=False)
    adapter.switch_off("cuda_graph_impl", "CUDA graphs", "none")
    adapter.switch_off("batch_invariant_mode", "batch-invariant kernels")
    adapter.switch_off("dsa_kernel_backend", "kernels of sparse attention", "none")
    adapter.switch_off("fine_grained_activation_offloading", "activation offload")
    if (adapter.get("cpu_offloading_num_layers") or 0) > 0:
        adapter.switch_off("cpu_offloading_num_layers", "activation offload", 0)
    adapter.switch_off("gpu_sniff_test_interval", "GPU self-test", None)
    adapter.switch_off("log_energy", "energy log")
    # A rank's own process reads the batches: forked workers would each copy the interpreter to
    # overlap with a GPU that is not there. The samples and their order do not depend on it.
    adapter.switch_off("num_workers", "data-loader workers", 0)
    adapter.switch_off("persistent_workers", "data-loader workers")
    adapter.switch_off("nvtx_ranges", "NVTX ranges")
    if adapter.get("fp8_param_gather") and not adapter.get("fp8"):
        adapter.switch_off("fp8_param_gather", "FP8 parameter gather")


def _skip_warmup() -> None:
    """Let ``set_jit_fusion_options`` set its options without the warm-up: nothing is compiled.

    It runs the fused functions on random inputs whose sizes depend on the tensor-parallel size. On
    a GPU that moves the CUDA generator only. Here the CUDA generator is the CPU's, so the warm-up
    would make ``--use-cpu-initialization``, which gives all layouts the same weights, depend on
    the layout.
    """
    importlib.import_module("megatron.training.initialize")
    for name in ("megatron.training.initialize", "megatron.bridge.training.initialize"):
        initialize: Any = sys.modules.get(name)
        if initialize is not None:
            initialize._warmup_jit_function = lambda *args, **kwargs: None


def _allocate_on_a_stream() -> None:
    """Let buffers of Megatron-FSDP 2 say that it was the current one; on a CPU, they have none."""
    import torch

    home = "megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.dbuffer"
    buffer: Any = importlib.import_module(home).DBuffer
    buffer.allocation_stream = property(
        lambda _: torch.cuda.current_stream(), lambda _, stream: None
    )


def adapt_arguments(args: Any) -> list[str]:
    """Switch off in ``args`` what a CPU cannot do; return short names of what the user loses.

    Called between Megatron's ``parse_args`` and ``validate_args``, so that Megatron derives its
    configuration, and checks it, from the adapted values. Applying it twice changes nothing more.
    """
    adapter = _Adapter(args)
    for step in (_adapt_communication, _adapt_layers, _adapt_kernels):
        step(adapter)
    if adapter.get("optimizer_cpu_offload"):
        offload.keep_apart()
    if adapter.get("use_megatron_fsdp") and adapter.get("megatron_fsdp_version") == 2:
        _allocate_on_a_stream()
    helpers_cpp.skip_compilation()
    _skip_warmup()
    _asked[:] = [label for label in adapter.changes if label not in _USUAL]
    return adapter.changes


def switched_off() -> tuple[str, ...]:
    """Of what the arguments that were adapted last lost, what is worth to be known with a pass."""
    return tuple(_asked)


def banner(changes: list[str]) -> str:
    """Return one line that says the CPU backend is on and what it switched off."""
    off = f"; switched off: {', '.join(changes)}" if changes else "; nothing had to be switched off"
    engine = f", TransformerEngine {te.releases.current()} emulated" if te.emulated() else ""
    return f"ttrace: no accelerator in use, running Megatron on the CPU over gloo{engine}{off}"
