# SPDX-License-Identifier: Apache-2.0
"""Pretrain BERT, or T5 with ``--decoder-seq-length``, on random tokens with padding.

As ``pretrain_bert.py`` and ``pretrain_t5.py`` did. Megatron-LM still has the models, but no longer
these scripts.
"""

import os
from functools import partial

import torch
from megatron.core import tensor_parallel
from megatron.core.enums import ModelType
from megatron.core.models.bert import bert_layer_specs
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.T5 import T5Model, t5_spec
from megatron.training import argument_utils, get_args, pretrain
from megatron.training import arguments as training_arguments
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.utils import average_losses_across_data_parallel_group

from tests.assay.planted.mistakes import PLANTED, plant

TOKENS = 64
MASK = 3


class Samples(torch.utils.data.Dataset):
    """Sequences of random lengths, the same for every layout."""

    def __init__(self, count, args):
        self.count, self.length, self.decoder = count, args.seq_length, args.decoder_seq_length

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        source = torch.Generator().manual_seed(int(index))
        tokens, inside = self._tokens(self.length, source)
        if self.decoder is None:
            masked = (torch.rand(self.length, generator=source) < 0.3) | (
                torch.arange(self.length) == 0
            )
            found = {
                "text": tokens.masked_fill(masked, MASK),
                "types": torch.arange(self.length) % 2,
                "labels": tokens,
                "is_random": torch.tensor(int(index) % 2),
                "loss_mask": masked & inside,
                "padding_mask": inside,
            }
        else:
            answer, written = self._tokens(self.decoder + 1, source)
            found = {
                "text_enc": tokens,
                "text_dec": answer[:-1],
                "labels": answer[1:],
                "loss_mask": written[1:],
                "enc_mask": inside,
                "dec_mask": written[1:],
            }
        return {name: value.long() for name, value in found.items()}

    @staticmethod
    def _tokens(length, source):
        inside = torch.arange(length) < torch.randint(length // 2, length, (), generator=source)
        return torch.randint(4, TOKENS - 1, (length,), generator=source) * inside, inside


def provide_datasets(counts, vp_stage=None):
    """Three data sets."""
    return [Samples(max(1, count or 0), get_args()) for count in counts]


provide_datasets.is_distributed = True


def provide_bert(
    pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None
):
    """One pipeline stage of BERT with both heads."""
    args = get_args()
    return BertModel(
        config=core_transformer_config_from_args(args),
        num_tokentypes=2,
        transformer_layer_spec=bert_layer_specs.get_bert_layer_with_transformer_engine_spec()
        if args.transformer_impl == "transformer_engine"
        else bert_layer_specs.bert_layer_local_spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
    )


def provide_t5(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    """The whole of T5: Megatron has no pipelines of it any more."""
    args = get_args()
    config = core_transformer_config_from_args(args)
    kind = "local" if args.transformer_impl == "local" else "transformer_engine"
    blocks = [
        getattr(t5_spec, f"get_t5_{part}_with_{kind}_block_spec")(args.num_layers)
        for part in ("encoder", "decoder")
    ]
    return T5Model(
        config=config,
        encoder_config=config,
        transformer_encoder_layer_spec=blocks[0],
        transformer_decoder_layer_spec=blocks[1],
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
    )


def bert_step(data_iterator, model):
    """Masked words, and the order of sentences."""
    names = ["text", "types", "labels", "is_random", "loss_mask", "padding_mask"]
    batch = tensor_parallel.broadcast_data(names, next(data_iterator), torch.int64)
    output = model(
        batch["text"],
        batch["padding_mask"],
        tokentype_ids=batch["types"],
        lm_labels=batch["labels"],
    )
    return output, partial(bert_loss, batch["loss_mask"], batch["is_random"])


def bert_loss(mask, order, output):
    """The sum of both heads' losses."""
    words, sentences = output
    loss = (words.float() * mask).sum() / mask.sum()
    loss = loss + torch.nn.functional.cross_entropy(sentences.float(), order.view(-1))
    return loss, {"lm loss": average_losses_across_data_parallel_group([loss])[0]}


def t5_step(data_iterator, model):
    """The decoder sees the encoder's padding."""
    names = ["text_enc", "text_dec", "labels", "loss_mask", "enc_mask", "dec_mask"]
    batch = tensor_parallel.broadcast_data(names, next(data_iterator), torch.int64)
    source, target = batch["enc_mask"] < 0.5, batch["dec_mask"] < 0.5
    length = target.shape[1]
    later = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)
    local = get_args().transformer_impl == "local"
    masks = [source[:, None, None, :], target[:, None, None, :], source[:, None, None, :]]
    if local:
        masks = [
            source[:, None, None, :].expand(-1, 1, source.shape[1], -1),
            target[:, None, None, :] | later,
            source[:, None, None, :].expand(-1, 1, length, -1),
        ]
    output = model(batch["text_enc"], batch["text_dec"], *masks, lm_labels=batch["labels"])
    return output, partial(t5_loss, batch["loss_mask"])


def t5_loss(mask, output):
    """The mean over words."""
    loss = (output.float() * mask).sum() / mask.sum()
    return loss, {"lm loss": average_losses_across_data_parallel_group([loss])[0]}


if __name__ == "__main__":
    if PLANTED in os.environ:
        plant(os.environ[PLANTED])
    args = training_arguments.parse_and_validate_args(args_defaults={"eval_interval": 1000})
    t5 = args.decoder_seq_length is not None
    pretrain(
        argument_utils.pretrain_cfg_container_from_args(args),
        provide_datasets,
        ModelType.encoder_or_decoder,
        t5_step if t5 else bert_step,
        provide_t5 if t5 else provide_bert,
    )
