# SPDX-License-Identifier: Apache-2.0
"""launch/pretrain_gpt.py with fill-in-the-middle data, and a tokenizer of single characters."""

import dataclasses
import importlib.util
from pathlib import Path

import megatron_ttrace

megatron_ttrace.enable()

from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer  # noqa: E402
from megatron.training import get_args  # noqa: E402
from megatron.training.datasets.fim_dataset import (  # noqa: E402
    GPTFIMDataset,
    GPTFIMDatasetConfig,
)

TOKENS = ("prefix", "middle", "suffix", "pad", "eod")

NullTokenizer.text_to_ids = lambda self, text: [ord(one) for one in text]
NullTokenizer.ids_to_text = lambda self, ids, remove_special_tokens=False: "".join(map(chr, ids))
NullTokenizer.tokens_to_ids = lambda self, tokens: [
    self.vocab_size - len(TOKENS) + TOKENS.index(one) for one in tokens
]

spec = importlib.util.spec_from_file_location(
    "pretrain_gpt", Path(__file__).parents[2] / "launch" / "pretrain_gpt.py"
)
training = importlib.util.module_from_spec(spec)
spec.loader.exec_module(training)
config_of, provide = training.dataset_config, training.provide_datasets


def with_fim(args):
    """The configuration of the data set that Megatron-LM's script makes."""
    plain = config_of(args)
    values = {
        field.name: getattr(plain, field.name) for field in dataclasses.fields(plain) if field.init
    }
    return GPTFIMDatasetConfig(
        **values,
        fim_rate=args.fim_rate,
        fim_spm_rate=args.fim_spm_rate,
        fim_extra_tokens={one: one for one in TOKENS},
    )


def provide_fim(samples, vp_stage=None):
    """The same data sets, of samples that are rearranged."""
    get_args().fim_data = False
    try:
        return provide(samples, vp_stage)
    finally:
        get_args().fim_data = True


provide_fim.is_distributed = True
training.dataset_config, training.GPTDataset = with_fim, GPTFIMDataset
training.provide_datasets = provide_fim
training.main()
