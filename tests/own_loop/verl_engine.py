# SPDX-License-Identifier: Apache-2.0
"""verl's Megatron engine: ``ttrace check -- torchrun --nproc-per-node 2 verl_engine.py --tp 2``.

``train_batch`` is what to copy; the rest makes a small engine and a batch of its own.
"""

import argparse
import itertools
import tempfile
from functools import partial
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from transformers import Qwen2Config, Qwen2ForCausalLM
from verl.models.mcore import util
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.megatron_utils import unwrap_model
from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
from verl.workers.engine.megatron import transformer_impl
from verl.workers.utils.losses import sft_loss

import megatron_ttrace


def train_batch(engine, data, loss_function, multiple):
    """``engine.train_batch(data, loss_function)``; under ``ttrace check``, it is checked."""
    tu.assign_non_tensor(data, sp_size=engine.engine_config.context_parallel_size)
    group = engine.get_data_parallel_group()
    made, indices = transformer_impl.prepare_micro_batches(data, dp_group=group)
    fields = [name for name, value in data.items() if torch.is_tensor(value)]
    settings = {name: tu.get(data, name) for name in {*data.keys()} - {*fields}}
    padding, outputs = SimpleNamespace(**vars(util.mpu)), {}
    if megatron_ttrace.is_reference():  # each sample gets the candidate's padding
        padding.get_tensor_model_parallel_world_size = lambda: multiple

    def step(batches):
        """The engine's step on these microbatches, instead of those that it would make."""
        parts = [tu.get_tensordict({name: batch[name] for name in fields}) for batch in batches]
        whole = tu.concat_tensordict(parts)
        tu.assign_non_tensor(whole, **settings)
        ends = itertools.accumulate(map(len, parts), initial=0)
        rows = [list(range(*pair)) for pair in itertools.pairwise(ends)]

        def prepared(data, **_):
            batches = [tu.index_select_tensor_dict(data, row) for row in rows]
            return batches, rows if megatron_ttrace.is_reference() else indices

        with (
            mock.patch.object(transformer_impl, "prepare_micro_batches", prepared),
            mock.patch.object(util, "mpu", padding),
        ):
            outputs.update(engine.train_batch(whole, loss_function))
        if not outputs:  # this is not the last pipeline stage
            return {}
        loss = torch.tensor(sum(outputs["loss"])) / engine.get_data_parallel_size()
        dist.all_reduce(loss, group=group)
        return {"loss": loss}

    batches = [{name: batch[name] for name in fields} for batch in made]
    for batch in batches:  # where context parallelism divides each padded sample
        lengths = batch["input_ids"].offsets().diff()
        padded = (lengths + multiple - 1) // multiple * multiple
        batch["cu_seqlens"] = torch.nn.functional.pad(padded.cumsum(0), (1, 0))
    megatron_ttrace.step(step, engine.module, engine.optimizer, batches)
    return outputs


def unscaled(model_output, data, dp_group):
    """A loss that forgets that gradients are averaged over data-parallel ranks."""
    loss, metrics = sft_loss(None, model_output, data, dp_group)
    return loss / data["dp_size"], metrics


parser = argparse.ArgumentParser()
for axis in ("tp", "pp", "cp"):
    parser.add_argument(f"--{axis}", type=int, default=1)
parser.add_argument("--fault", choices=["unscaled", "unfinished"])
args = parser.parse_args()
multiple = args.tp * args.cp * (2 if args.cp > 1 else 1)  # to which verl pads each sample
if megatron_ttrace.is_reference():  # it is built for one device
    args.tp = args.pp = args.cp = 1

dist.init_process_group("gloo")
torch.manual_seed(1)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 128}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
with tempfile.TemporaryDirectory() as folder:
    Qwen2ForCausalLM(Qwen2Config(**sizes, **heads)).save_pretrained(folder)
    engine = transformer_impl.MegatronEngineWithLMHead(
        HFModelConfig(
            path=folder,
            load_tokenizer=False,
            tokenizer=SimpleNamespace(pad_token_id=0, bos_token_id=1, eos_token_id=2),
        ),
        McoreEngineConfig(
            tensor_model_parallel_size=args.tp,
            pipeline_model_parallel_size=args.pp,
            context_parallel_size=args.cp,
        ),
        McoreOptimizerConfig(lr=1e-3, total_training_steps=10),
        CheckpointConfig(),
    )
    engine.initialize()
if args.fault == "unfinished":  # each rank keeps the gradients that it has
    for chunk in engine.module:
        unwrap_model(chunk).config.finalize_model_grads_func = lambda *_, **__: None

draw = torch.Generator().manual_seed(engine.get_data_parallel_rank())
lengths = [9, 23, 14, 7]
samples = {
    "input_ids": [torch.randint(3, 128, (length,), generator=draw) for length in lengths],
    "position_ids": [torch.arange(length) for length in lengths],
    "loss_mask": [(torch.arange(length) >= 4).long() for length in lengths],
}
packed = {k: torch.nested.as_nested_tensor(v, layout=torch.jagged) for k, v in samples.items()}
data = tu.get_tensordict(packed, {"temperature": 1.0, "max_token_len_per_gpu": 32})
loss_function = unscaled if args.fault == "unscaled" else partial(sft_loss, None)
with engine.train_mode():
    outputs = train_batch(engine, data, loss_function, multiple)
print(outputs.get("loss"), outputs.get("metrics"))
