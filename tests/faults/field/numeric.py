# SPDX-License-Identifier: Apache-2.0
# over 500 lines because: it is a table, one entry per fault
"""Numeric faults of a parallel job, as patches that a training script makes before it trains.

Each is a single mistake that only the candidate makes (its ranks are more than one). ``wrap``
replaces a function by one that is given the original; ``RANK`` is the process's.
"""

from __future__ import annotations

import dataclasses

PREAMBLE = """
import functools, os, sys
RANK = int(os.environ.get("RANK", "0"))

def wrap(owner, name, new, static=False):
    old = getattr(owner, name)

    @functools.wraps(old)
    def wrapped(*args, **more):
        open(os.environ["FIELD_MARK"], "a").close()
        return new(old, *args, **more)

    setattr(owner, name, staticmethod(wrapped) if static else wrapped)
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Numeric:
    """A fault: the job it is put into, by words of ``matrix/configurations.py``, and the patch."""

    id: str
    model: str
    layout: str
    code: str
    ranks: int = 2


_LATE = """
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.mlp import MLP
from megatron.core import parallel_state
REDUCE = layers.reduce_from_tensor_model_parallel_region
def late(forward, self, *inputs, **more):
    group = parallel_state.get_tensor_model_parallel_group()
    layers.reduce_from_tensor_model_parallel_region = lambda summand, group=None: {summand}
    try:
        output, bias = forward(self, *inputs, **more)
    finally:
        layers.reduce_from_tensor_model_parallel_region = REDUCE
    return {later}, bias
wrap(MLP, "forward", late)
"""
"""A fork that adds the summands of its MLP up outside of the last linear layer."""

_SHARED = """
import torch
from megatron.core.transformer.moe import shared_experts as module
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
"""
_ATTENTION = "from megatron.core.transformer.dot_product_attention import DotProductAttention\n"
_MAPPINGS = "from megatron.core.tensor_parallel import mappings\n"
_SAMPLERS = "from megatron.training.datasets import data_samplers as module\n"
_FINAL = (
    "import importlib\n"
    "module = importlib.import_module('megatron.core.distributed.finalize_model_grads')\n"
)

NUMERIC = (
    # Wrong scale, order, mask or group with tensor parallelism.
    Numeric(
        "tp-sum-in-bf16",
        "gpt",
        "tp2",
        "from megatron.core.tensor_parallel import mappings\n"
        "wrap(mappings, '_reduce', lambda old, x, group: old(x.bfloat16().to(x.dtype), group))",
    ),
    Numeric(
        "tp-keys-of-another-head",
        "llama",
        "tp2",
        _ATTENTION + "wrap(DotProductAttention, 'forward', lambda old, self, q, k, v, *a, **m: "
        "old(self, q, k.roll(1, 2) if RANK else k, v, *a, **m))",
    ),
    Numeric(
        "tp-softmax-scale-of-the-partition",
        "gpt",
        "tp2",
        _ATTENTION + "def forward(old, self, *a, **m):\n"
        "    scale, self.softmax_scale = self.softmax_scale, self.softmax_scale * 2**0.5\n"
        "    try:\n        return old(self, *a, **m)\n"
        "    finally:\n        self.softmax_scale = scale\n"
        "wrap(DotProductAttention, 'forward', forward)",
    ),
    Numeric(
        "tp-bias-once-per-rank",
        "gpt",
        "tp2",
        "from megatron.core.tensor_parallel.layers import RowParallelLinear\n"
        "def forward(old, self, x):\n    out, bias = old(self, x)\n"
        "    return out, None if bias is None else bias * self.tp_group.size()\n"
        "wrap(RowParallelLinear, 'forward', forward)",
    ),
    Numeric(
        "tp-embedding-mean",
        "gpt",
        "tp2",
        "from megatron.core.tensor_parallel.layers import VocabParallelEmbedding\n"
        "wrap(VocabParallelEmbedding, 'forward', lambda old, self, x: old(self, x) / 2)",
    ),
    Numeric(
        "sp-halves-swapped",
        "gpt",
        "tp2 sp",
        "import torch\n" + _MAPPINGS + "wrap(mappings, '_split_along_first_dim', lambda old, x, "
        "group: old(x.roll(x.shape[0] // 2, 0), group))",
    ),
    Numeric(
        "tp-qk-norm-not-summed",
        "gpt",
        "tp2 qk-norm",
        _FINAL + "def reduce(old, model, *a, **m):\n"
        "    kept = [(p, p.main_grad.clone()) for c in model for n, p in c.named_parameters() "
        "if 'layernorm' in n and ('q_' in n or 'k_' in n)]\n"
        "    old(model, *a, **m)\n"
        "    for p, grad in kept:\n        p.main_grad.copy_(grad)\n"
        "wrap(module, '_allreduce_non_tensor_model_parallel_grads', reduce)",
    ),
    Numeric(
        "tp-mask-hides-the-diagonal",
        "gpt",
        "tp2",
        "import torch\nfrom megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax\n"
        "def forward(old, self, x, mask, *a, **m):\n"
        "    if RANK:\n        x = x.clone(); x[..., 3, 3] = -10000.0\n"
        "    return old(self, x, mask, *a, **m)\n"
        "wrap(FusedScaleMaskSoftmax, 'forward', forward)",
    ),
    Numeric(
        "tp-rotary-base-of-one-rank",
        "llama",
        "tp2",
        "from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding\n"
        "wrap(RotaryEmbedding, 'forward', lambda old, self, *a, **m: "
        "old(self, *a, **m) * (1.0001 if RANK else 1))",
    ),
    Numeric(
        "tp-dgrad-of-the-head-not-summed",
        "gpt",
        "tp2",
        "from megatron.core.tensor_parallel import layers as module\n"
        "def forward(old, self, *a, **m):\n"
        "    kept = self.allreduce_dgrad, module.copy_to_tensor_model_parallel_region\n"
        "    if self.bias is None:\n        self.allreduce_dgrad = False\n"
        "        module.copy_to_tensor_model_parallel_region = lambda x, group=None: x\n"
        "    try:\n        return old(self, *a, **m)\n    finally:\n"
        "        self.allreduce_dgrad, module.copy_to_tensor_model_parallel_region = kept\n"
        "wrap(module.ColumnParallelLinear, 'forward', forward)",
    ),
    Numeric(
        "tp-one-gelu-is-exact",
        "gpt",
        "tp2 --no-bias-gelu-fusion",
        "import torch\nfrom megatron.core.transformer.mlp import MLP\n"
        "def forward(old, self, *a, **m):\n"
        "    if RANK:\n        self.activation_func = "
        "lambda x: torch.nn.functional.gelu(x, approximate='tanh')\n"
        "    return old(self, *a, **m)\nwrap(MLP, 'forward', forward)",
    ),
    # Fewer groups of keys and values than ranks.
    Numeric(
        "kv-gradient-not-summed",
        "gpt",
        "tp2 kv1",
        _MAPPINGS + "def back(old, ctx, grad):\n"
        "    return mappings._split_along_last_dim(grad, ctx.group), None\n"
        "wrap(mappings._AllGatherFromTensorParallelRegion, 'backward', back, static=True)",
    ),
    Numeric(
        "kv-gradient-averaged",
        "gpt",
        "tp2 kv1",
        _MAPPINGS + "def back(old, ctx, grad):\n    found = old(ctx, grad)\n"
        "    return (found[0] / 2, *found[1:])\n"
        "wrap(mappings._AllGatherFromTensorParallelRegion, 'backward', back, static=True)",
    ),
    Numeric(
        "kv-keys-detached-on-one-rank",
        "gpt",
        "tp2 kv1",
        _ATTENTION + "wrap(DotProductAttention, 'forward', lambda old, self, q, k, v, *a, **m: "
        "old(self, q, k.detach() if RANK else k, v, *a, **m))",
    ),
    Numeric(
        "kv-group-of-the-neighbour",
        "gpt",
        "tp4 kv2",
        "from megatron.core.transformer import attention as module\n"
        "wrap(module, 'get_pg_rank', lambda old, group: old(group) ^ 2)",
        4,
    ),
    Numeric(
        "kv-gradient-counted-twice-on-one-rank",
        "gpt",
        "tp2 kv1",
        "import torch\n" + _ATTENTION + "def forward(old, self, q, k, v, *a, **m):\n"
        "    if RANK:\n        v = v + (v - v.detach())\n"
        "    return old(self, q, k, v, *a, **m)\n"
        "wrap(DotProductAttention, 'forward', forward)",
    ),
    # Summands that are excused if something adds them up.
    Numeric(
        "late-reduction-also-in-the-gradient",
        "gpt",
        "tp2",
        _MAPPINGS
        + _LATE.format(summand="summand", later="REDUCE(output, group=group)")
        + "wrap(mappings._ReduceFromModelParallelRegion, 'backward', lambda old, ctx, grad: "
        "(mappings._reduce(grad, ctx.group if hasattr(ctx, 'group') else None), None) "
        "if hasattr(ctx, 'group') else (grad * 2, None), static=True)",
    ),
    Numeric(
        "summand-through-a-faint-gate",
        "gpt",
        "tp2",
        _LATE.format(
            summand="summand", later="REDUCE(output, group=group) + 1e-3 * (output * output).mean()"
        ),
    ),
    Numeric(
        "summand-clipped-before-the-sum",
        "gpt",
        "tp2",
        _LATE.format(
            summand="summand",
            later="REDUCE(output.clamp(-abs(output).max() * 0.9, abs(output).max() * 0.9), "
            "group=group)",
        ),
    ),
    Numeric(
        "late-sum-without-its-gradient",
        "gpt",
        "tp2",
        _LATE.format(
            summand="summand",
            later="REDUCE(output.detach(), group=group) + (output - output.detach()) * 0.5",
        ),
    ),
    Numeric(
        "late-sum-of-the-last-microbatch",
        "gpt",
        "tp2",
        "OLD = {}\n"
        + _LATE.format(
            summand="summand",
            later="(lambda now: (OLD.setdefault(id(self), []).append(now.detach()), "
            "now + (0.01 * (OLD[id(self)][-2] - now.detach()) if len(OLD[id(self)]) > 1 "
            "else 0))[1])(REDUCE(output, group=group))",
        ),
    ),
    Numeric(
        "shared-overlap-not-reduced",
        "moe-deep",
        "tp2 sp alltoall etp1 shared-overlap",
        _SHARED + _MAPPINGS + "wrap(module, 'reduce_scatter_to_sequence_parallel_region', "
        "lambda old, x, group=None: 2 * mappings.scatter_to_sequence_parallel_region(x, group))",
    ),
    Numeric(
        "shared-overlap-summed-in-bf16",
        "moe-deep",
        "tp2 sp alltoall etp1 shared-overlap",
        _SHARED + "wrap(module, 'reduce_scatter_to_sequence_parallel_region', "
        "lambda old, x, group=None: old(x.bfloat16().to(x.dtype), group=group))",
    ),
    Numeric(
        "shared-overlap-gradient-split",
        "moe-deep",
        "tp2 sp alltoall etp1 shared-overlap",
        _SHARED + "wrap(module, 'gather_from_sequence_parallel_region', lambda old, x, "
        "tensor_parallel_output_grad=True, group=None: old(x, False, group=group))",
    ),
    Numeric(
        "shared-overlap-stale-output",
        "moe-deep",
        "tp2 sp alltoall etp1 shared-overlap",
        _SHARED + "STALE = {}\n"
        "def output(old, self):\n    now = old(self)\n"
        "    before = STALE.get(id(self), now.detach())\n    STALE[id(self)] = now.detach()\n"
        "    return now + (before - now.detach()) * (RANK == 1)\n"
        "wrap(SharedExpertMLP, 'get_output', output)",
    ),
    # Pipelines.
    Numeric(
        "pp-stale-microbatch",
        "gpt",
        "pp2",
        "from megatron.core.pipeline_parallel import schedules as module\nSTALE = []\n"
        "def step(old, f, data, model, n, tensor, *a, **m):\n"
        "    if RANK and tensor is not None:\n"
        "        x = tensor[0] if isinstance(tensor, list) else tensor\n"
        "        now = x.detach().clone()\n"
        "        if STALE:\n            x.data.copy_(STALE[-1])\n"
        "        STALE.append(now)\n"
        "    return old(f, data, model, n, tensor, *a, **m)\n"
        "wrap(module, 'forward_step', step)",
    ),
    Numeric(
        "pp-gradient-in-bf16",
        "gpt",
        "pp2",
        "from megatron.core.pipeline_parallel import schedules as module\n"
        "def step(old, *a, **m):\n    found = old(*a, **m)\n"
        "    if RANK:\n        for x in found if isinstance(found, list) else [found]:\n"
        "            x.copy_(x.bfloat16())\n"
        "    return found\nwrap(module, 'backward_step', step)",
    ),
    Numeric(
        "pp-tied-embedding-averaged",
        "gpt",
        "pp2",
        _FINAL + "def reduce(old, model, *a, **m):\n    old(model, *a, **m)\n"
        "    for c in model:\n        for n, p in c.named_parameters():\n"
        "            if 'word_embeddings' in n or 'output_layer' in n:\n"
        "                p.main_grad.div_(2)\n"
        "wrap(module, '_allreduce_word_embedding_grads', reduce)",
    ),
    Numeric(
        "vpp-loss-over-chunks",
        "gpt",
        "pp2 vpp2",
        "from megatron.core.pipeline_parallel import schedules as module\n"
        "wrap(module, 'forward_step_calc_loss', lambda old, model, out, f, config, stage, collect, "
        "n, *a, **m: old(model, out, f, config, stage, collect, n * 2, *a, **m))",
    ),
    Numeric(
        "pp-epsilon-of-the-last-stage",
        "gpt",
        "pp2",
        "from megatron.core.models.gpt.gpt_model import GPTModel\n"
        "def init(old, self, *a, **m):\n    old(self, *a, **m)\n"
        "    for x in self.modules():\n"
        "        if RANK and hasattr(x, 'eps'):\n            x.eps = x.eps * 10\n"
        "wrap(GPTModel, '__init__', init)",
    ),
    # Context parallelism.
    Numeric(
        "cp-contiguous-positions",
        "llama-te",
        "cp2",
        "from megatron.core.models.common.embeddings import rotary_pos_embedding as module\n"
        "wrap(module, 'get_pos_emb_on_this_cp_rank', lambda old, emb, dim, group: "
        "emb.chunk(group.size(), dim)[group.rank()])",
    ),
    Numeric(
        "cp-labels-of-the-other-half",
        "llama-te",
        "cp2",
        "from megatron.core import utils as module\n"
        "def split(old, batch, *a, **m):\n    labels = batch.get('labels')\n"
        "    found = old(batch, *a, **m)\n"
        "    if labels is not None and labels.dim() == 2:\n"
        "        found['labels'] = labels.chunk(2, 1)[RANK].contiguous()\n"
        "    return found\n"
        "wrap(module, '_get_batch_on_this_cp_rank_per_sequence_balancing', split)",
    ),
    # Experts.
    Numeric(
        "ep-probabilities-lost-on-the-way",
        "moe-te",
        "ep2 alltoall",
        "import torch\nfrom megatron.core.transformer.moe.token_dispatcher import "
        "MoEAlltoAllTokenDispatcher as D\n"
        "def dispatch(old, self, *a, **m):\n    tokens, probs = old(self, *a, **m)\n"
        "    return tokens, probs.detach()\n"
        "wrap(D, 'token_dispatch', dispatch)",
    ),
    Numeric(
        "ep-gradients-of-experts-doubled",
        "moe-te",
        "ep2 alltoall",
        "from megatron.core.distributed.distributed_data_parallel import "
        "DistributedDataParallel as D\n"
        "def init(old, self, *a, **m):\n    old(self, *a, **m)\n"
        "    for buffer in self.expert_parallel_buffers:\n"
        "        for bucket in buffer.buckets:\n            bucket.gradient_scaling_factor *= 2\n"
        "wrap(D, '__init__', init)",
    ),
    Numeric(
        "ep-bias-of-local-loads",
        "moe-deep",
        "ep2 alltoall",
        "import torch\n" + _FINAL + "def update(old, loads, bias, rate, tp_dp_cp_group=None):\n"
        "    return bias + torch.sign(loads.mean(-1, keepdim=True) - loads) * rate\n"
        "wrap(module, 'get_updated_expert_bias', update)",
    ),
    Numeric(
        "ep-aux-loss-of-local-tokens",
        "moe-te",
        "tp2 sp ep2 etp1 alltoall",
        "from megatron.core.transformer.moe import moe_utils as module\n"
        "wrap(module, 'reduce_from_tensor_model_parallel_region', "
        "lambda old, x, group=None: x * group.size())",
    ),
    Numeric(
        "ep-z-loss-not-averaged",
        "moe-deep",
        "tp2 sp ep2 etp1 alltoall",
        "from megatron.core.transformer.moe import router as module\n"
        "wrap(module, 'z_loss_func', "
        "lambda old, x, coefficient, **m: old(x, coefficient * 2, **m))",
    ),
    Numeric(
        "etp-partner-left-out",
        "moe-te",
        "tp2 sp alltoall",
        "from megatron.core.transformer.moe import token_dispatcher as module\n"
        "from megatron.core.tensor_parallel import mappings\n"
        "wrap(module, 'reduce_scatter_to_sequence_parallel_region', lambda old, x, group=None, "
        "**m: old(x * (1 if RANK else 0.999), group=group, **m))",
    ),
    # Data parallelism: gradients, sharded optimizers, samples.
    Numeric(
        "zero-stale-parameter",
        "gpt",
        "zero --bf16",
        "from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer as D\n"
        "def copy(old, self):\n"
        "    kept = [(p, p.detach().clone()) for g in self.model_float16_groups for p in g[-1:]]\n"
        "    old(self)\n"
        "    for p, before in kept if RANK else ():\n        p.data.copy_(before)\n"
        "wrap(D, '_copy_main_params_to_model_params', copy)",
    ),
    Numeric(
        "zero-stale-copy",
        "gpt",
        "zero --bf16",
        "from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer as D\n"
        "def step(old, self):\n"
        "    kept = [(p, p.detach().clone()) for p in list(self.model_param_gbuf_map)[:1]]\n"
        "    found = old(self)\n"
        "    for p, before in kept if RANK else ():\n        p.data.copy_(before)\n"
        "    return found\nwrap(D, 'step_with_ready_grads', step)",
    ),
    Numeric(
        "main-weights-never-copied",
        "gpt",
        "tp2 --bf16",
        "from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params as D\n"
        "def copy(old, self):\n"
        "    kept = [(p, p.detach().clone()) for g in self.float16_groups for p in g[:1]]\n"
        "    old(self)\n"
        "    for p, before in kept:\n        p.data.copy_(before)\n"
        "wrap(D, '_copy_main_params_to_model_params', copy)",
    ),
    Numeric(
        "zero-epsilon-of-one-rank",
        "gpt",
        "zero",
        "from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer as D\n"
        "def step(old, self):\n    for g in self.optimizer.param_groups:\n"
        "        g['eps'] = 1e-5 if RANK else 1e-8\n    return old(self)\n"
        "wrap(D, 'step_with_ready_grads', step)",
    ),
    Numeric(
        "dp-learning-rate-of-one-rank",
        "gpt",
        "",
        "from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler as S\n"
        "wrap(S, 'get_lr', lambda old, self, g: old(self, g) * (1.001 if RANK else 1))",
    ),
    Numeric(
        "dp-per-token-count-of-one-rank",
        "gpt",
        "per-token",
        _FINAL + "def final(old, model, tokens=None, *a, **m):\n"
        "    return old(model, tokens * 2 if RANK and tokens is not None else tokens, *a, **m)\n"
        "from megatron.training import training\n"
        "wrap(module, 'finalize_model_grads', final)\n"
        "training.finalize_model_grads = module.finalize_model_grads",
    ),
    Numeric(
        "dp-same-samples-on-all-ranks",
        "gpt",
        "--dataloader-type cyclic",
        _SAMPLERS + "def init(old, self, *a, **m):\n    old(self, *a, **m)\n"
        "    self.data_parallel_rank = 0\n"
        "wrap(module.MegatronPretrainingRandomSampler, '__init__', init)",
    ),
    Numeric(
        "dp-same-samples-without-sharding",
        "gpt",
        "--dataloader-type cyclic --no-data-sharding",
        _SAMPLERS + "def init(old, self, *a, **m):\n    old(self, *a, **m)\n"
        "    self.data_parallel_rank = 0\n"
        "wrap(module.MegatronPretrainingRandomSampler, '__init__', init)",
    ),
    Numeric(
        "dp-overlapping-shards",
        "gpt",
        "--dataloader-type cyclic",
        _SAMPLERS + "def iterate(old, self):\n"
        "    first = None\n"
        "    for batch in old(self):\n        first = first or batch\n        yield first\n"
        "wrap(module.MegatronPretrainingRandomSampler, '__iter__', iterate)",
    ),
    Numeric(
        "dp-same-samples-in-order",
        "gpt",
        "",
        _SAMPLERS + "wrap(module.MegatronPretrainingSampler, 'get_start_end_idx', "
        "lambda old, self: (0, self.micro_batch_size))",
    ),
    Numeric(
        "fsdp-gradients-averaged-twice",
        "gpt-te",
        "fsdp optim_grads_params",
        "from megatron.training import training as module\nimport torch\n"
        "REDUCE = torch.distributed.reduce_scatter_tensor\n"
        "def reduce(old, *a, **m):\n    (m['input'] if 'input' in m else a[1]).mul_(0.5)\n"
        "    return old(*a, **m)\n"
        "wrap(torch.distributed, 'reduce_scatter_tensor', reduce)",
    ),
    # Recomputation and loading.
    Numeric(
        "recompute-other-input",
        "gpt",
        "tp2 recompute uniform 1",
        "from megatron.core.tensor_parallel import random as module\n"
        "wrap(module, 'detach_variable', lambda old, inputs: tuple("
        "(x * 1.01).detach().requires_grad_(True) if getattr(x, 'requires_grad', False) else x "
        "for x in old(inputs)))",
    ),
    Numeric(
        "norm-weights-rounded-on-one-rank",
        "gpt",
        "tp2",
        "from megatron.training import training as module\n"
        "def step(old, *a, **m):\n    import torch\n    model = a[2][0]\n"
        "    with torch.no_grad():\n        for n, p in model.named_parameters():\n"
        "            if RANK and 'final_layernorm.weight' in n:\n"
        "                p.copy_(p.half())\n"
        "    return old(*a, **m)\n"
        "wrap(module, 'train_step', step)",
    ),
)
