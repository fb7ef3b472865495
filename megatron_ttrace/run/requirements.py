# SPDX-License-Identifier: Apache-2.0
"""Which runs cannot be traced, and notices about those that can."""

import importlib
import os
import re
import sys
from typing import Any

from megatron_ttrace import cpu
from megatron_ttrace.jobs import argv, provenance, reference_arguments, reference_layout
from megatron_ttrace.jobs.settings import Settings
from megatron_ttrace.mcore import balancing, fronts, own_shards, samples, versions
from megatron_ttrace.mcore.arguments import MegatronArguments
from megatron_ttrace.mcore.checkpoints import loading
from megatron_ttrace.mcore.options import decisions
from megatron_ttrace.run import low_precision
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.sanitise import in_one_line

_ISOLATED = "modules are isolated: each is given the reference's inputs (--ttrace-isolate)"


def growing_batch(args: MegatronArguments) -> tuple[str, int]:
    """The option by which the batch grows, and its last size; empty and 0 if it stays the same."""
    if args.rampup_batch_size and samples.has_ramp():
        return "--rampup-batch-size", int(args.global_batch_size)
    sizes = [
        step.rpartition(":")[2]
        for step in (getattr(args, "step_batch_size_schedule", None) or "").split()
    ]
    if len(sizes) < 2:
        return "", 0
    return "--step-batch-size-schedule", max((int(s) for s in sizes if s.isdigit()), default=0)


def isolates(args: MegatronArguments, settings: Settings) -> bool:
    """Whether modules are checked one by one, with the reference's inputs."""
    return settings.isolate or low_precision.is_isolated(args)


def require(args: MegatronArguments, settings: Settings) -> None:
    """Raise ``TTraceError`` for a candidate that cannot be traced."""

    def has(option: str) -> bool:
        return bool(getattr(args, option, False))

    for why in decisions.refusals(args):
        raise TTraceError(why)
    _require_layout(args, settings)
    lacks = loading.missing(args)
    if lacks and settings.exit_after and not loading.is_first_start(args):
        ends = has("exit_on_missing_checkpoint")
        then = "end the job" if ends else "start from random weights"
        raise TTraceError(
            f"{lacks}: Megatron would {then}: give the directory of a checkpoint, or omit the "
            "option"
        )
    ramp, _ = growing_batch(args)
    if ramp and settings.iterations != (1,):
        raise TTraceError(
            f"{ramp}: only --ttrace-iterations 1 can be traced, because the batch grows"
        )
    require_iterations(args, settings)
    if has("use_torch_fsdp2") and has("init_model_with_meta_device"):
        raise TTraceError(
            "--use-torch-fsdp2 with --init-model-with-meta-device: Megatron leaves the weights "
            "without memory: omit the latter"
        )
    if getattr(args, "cuda_graph_impl", "none") != "none":
        raise TTraceError(
            "--cuda-graph-impl: modules in a CUDA graph run without hooks; check the same job with "
            "--cuda-graph-impl none"
        )
    if has("logits_load_dir") or has("logits_save_dir"):
        raise TTraceError(
            "--logits-load-dir, --logits-save-dir: they count the microbatches of an iteration, "
            "which a check repeats: check the job without them"
        )
    if has("use_megatron_fsdp") and loading.directory_of(args) is not None:
        raise TTraceError(
            "--use-megatron-fsdp with --load: a reference cannot get the loaded state"
        )
    if has("overlap_moe_expert_parallel_comm") and has("hybrid_layer_pattern"):
        raise TTraceError(
            "--overlap-moe-expert-parallel-comm with --hybrid-layer-pattern: the pieces in which "
            "its layers run are not captured: check the same job without the overlap"
        )
    if (
        has("fim_data")
        and getattr(args, "data_parallel_size", 1) > 1
        and not samples.is_by_sample(args, exits=settings.exit_after)
    ):
        raise TTraceError(
            "--fim-data with data parallelism: each rank rearranges samples at random in the order "
            "in which it reads them, so layouts train on different samples: check the job with "
            "--ttrace-exit, which rearranges each sample by its index"
        )
    at_once = getattr(args, "micro_batch_size", 1) * getattr(args, "data_parallel_size", 1)
    if has("decrease_batch_size_if_needed") and (left := args.global_batch_size % at_once):
        raise TTraceError(
            f"--decrease-batch-size-if-needed: a step leaves {left} of its samples out, and one "
            f"device does not: check it with --global-batch-size {args.global_batch_size - left}"
        )
    if has("dataloader_seq_length") and getattr(args, "context_parallel_size", 1) > 1:
        raise TTraceError(
            "--context-parallel-size in a model of images: how ranks divide their samples is not "
            "known: check the job without it"
        )
    # Options of pull requests 6776 and 6512, which other loops cannot name.
    layouts = map(vars(args).get, ("linear_cp_layout", "mtp_cp_token_layout"))
    if "contiguous" in layouts and getattr(args, "context_parallel_size", 1) > 1:
        raise TTraceError(
            "a contiguous context-parallel layout: which tokens a rank has is known of Megatron's "
            "zigzag layout only: check the job with that"
        )
    main_weights = getattr(args, "main_params_dtype", None)
    if main_weights is not None and main_weights.itemsize < 4:
        raise TTraceError(
            "--main-params-dtype fp16: each rank rounds its main weights with a different scale, "
            "so layouts differ by design: check the job with fp32"
        )
    if (
        any(map(has, samples.PACKING))
        and args.num_experts
        and args.micro_batch_size > 1
        and (args.context_parallel_size > 1 or args.sequence_parallel)
    ):
        raise TTraceError(
            "packed sequences with experts, context or sequence parallelism, and several samples "
            "in a microbatch: Megatron arranges the tokens differently than on a single device: "
            "check the job with --micro-batch-size 1"
        )
    if has("use_precision_aware_optimizer") and loading.loads_optimizer(args):
        raise TTraceError(
            "--use-precision-aware-optimizer with --load: the reference cannot get the loaded "
            "state of the optimizer: check the job with --no-load-optim"
        )
    if has("use_layer_wise_distributed_optimizer") and not args.bf16:
        raise TTraceError(
            "--use-distributed-optimizer with an optimizer other than Adam: Megatron supports it "
            "only with --bf16: add that, or omit --use-distributed-optimizer"
        )
    if balancing.depends_on_layout(args) and has("moe_pad_expert_input_to_capacity"):
        raise TTraceError(
            "--moe-pad-expert-input-to-capacity with sequence or context parallelism: padding "
            "depends on a rank's tokens, so layouts differ by design: check the job without it"
        )


def _require_spec(spec: Any) -> None:
    """Raise ``TTraceError`` for a ``--spec`` that Megatron has logged as an error, and ignored.

    Where Megatron has imported it, nothing is imported here: that might draw random numbers.
    """
    if not isinstance(spec, list) or len(spec) != 2 or spec[0] in sys.modules:
        return
    try:
        importlib.import_module(spec[0])
    except ImportError as error:
        raise TTraceError(
            f"--spec {' '.join(spec)}: {in_one_line(error)}: Megatron trains its default layers"
        ) from error


def _require_layout(args: MegatronArguments, settings: Settings) -> None:
    """Raise ``TTraceError`` for a run that no reference on several ranks can be made for."""
    layout = settings.reference_layout
    if layout is None:
        return
    import torch

    options = reference_arguments.explicit(settings.reference_args) & {*decisions.SINGLE_DEVICE}
    if options:
        raise TTraceError(
            "--ttrace-reference-layout: --ttrace-reference-args also changes "
            f"{', '.join(sorted(options))}: omit that"
        )
    devices = None if cpu.active() else torch.cuda.device_count()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if why := reference_layout.refusal(layout, args, world_size=world_size, devices=devices):
        raise TTraceError(why)


def require_iterations(args: MegatronArguments, settings: Settings) -> None:
    """Raise ``TTraceError`` if the job ends before the last traced iteration, where that is known.

    Iterations count from the job's first step. Megatron knows where a checkpoint lets it begin once
    the model is loaded, and how many steps ``--train-samples`` are when it has an optimizer.
    """
    if not args.train_iters:
        return
    first = getattr(args, "iteration", 0)
    last = args.train_iters
    if interval := getattr(args, "exit_interval", None):
        last = min(last, (first // interval + 1) * interval)
    if settings.iterations[-1] > last - first:
        raise TTraceError(
            f"--ttrace-iterations {settings.iterations[-1]}: the job ends after iteration "
            f"{last - first}: trace an earlier one, or train longer"
        )


def require_built(args: MegatronArguments, settings: Settings) -> None:
    """Raise ``TTraceError`` for what a script knows once it has built the model."""
    require_iterations(args, settings)
    _require_spec(getattr(args, "spec", None))
    text, padded = (
        getattr(args, name, None) for name in ("dataloader_seq_length", "decoder_seq_length")
    )
    # ``args.seq_length`` is now the length of an image (``model_provider`` of pretrain_vlm.py).
    if text and args.sequence_parallel and text + args.seq_length != padded:
        raise TTraceError(
            f"--dataloader-seq-length {text} in a model of images, with --sequence-parallel: the "
            f"script pads text and image ({text} + {args.seq_length}) for the tensor-parallel "
            "ranks, so a single device trains on shorter samples: choose a length that needs no "
            "padding"
        )


def complete(args: MegatronArguments, settings: Settings) -> list[str]:
    """Give options that the loop crashes without, unless training goes on; notices about them."""
    is_checked_only = settings.exit_after or settings.role == "reference"
    return fronts.current().complete(args) if is_checked_only else []


def notices(args: MegatronArguments, settings: Settings) -> list[str]:
    """How this run is checked, for the report."""
    notices = []
    if lacks := loading.missing(args):
        notices.append(f"nothing was loaded: {lacks}; the check starts from generated values")
    if args.rampup_batch_size and not samples.has_ramp():
        notices.append(
            "--rampup-batch-size: this Megatron ignores it, so every batch has "
            f"{args.global_batch_size} samples; it has --step-batch-size-schedule instead"
        )
    if isolates(args, settings):
        notices.append(_ISOLATED if settings.isolate else low_precision.NOTICE)
    if options := balancing.depends_on_layout(args):
        notices.append(
            f"{' and '.join(options.values())}: routing depends on all tokens of a rank, which has "
            "a part of a microbatch in this layout, so by design it differs from one device's; "
            "both runs use the reference's routing"
        )
    option = own_shards.depends_on_layout(args)[1]
    if option and max(own_shards.ranks_of_blocks(args)) == 1:
        notices.append(
            f"{option}: every tensor-parallel rank updates its own shard of a matrix, so by design "
            "updates differ from a single device's: they are unchecked; gradients are judged"
        )
    if samples.is_by_sample(args, exits=settings.exit_after):
        notices.append(
            "--fim-data: each sample is rearranged with a random generator of its own, not that of "
            "the rank that reads it, so that all layouts have the same samples"
        )
    notices += fronts.current().notices()
    version = versions.unreleased(versions.megatron_core_version())
    if version and not provenance.megatron().commit.startswith(versions.MAIN_COMMIT):
        notices.append(version)
    words = [*argv.given(), *argv.theirs()] if fronts.current().has_flags else []
    flags = dict.fromkeys(word.partition("=")[0] for word in words if re.match("--[a-z]", word))
    unknown = [
        flag for flag in flags if not flag.startswith("--ttrace") and not decisions.option_of(flag)
    ]
    if unknown:
        notices.append(
            f"{', '.join(unknown)}: not an option of a known Megatron, so the reference has it, "
            "too; --ttrace-reference-args sets what a single device must have instead"
        )
    if settings.reference is not None and settings.allow_other_megatron:
        notices.append("the reference may have been made by another Megatron")
    if shrunk := os.environ.get(provenance.SHRUNK):
        notices.append(shrunk)
    return notices
