# SPDX-License-Identifier: Apache-2.0
"""Train a recipe of Megatron-Bridge, made small, without a model hub.

``driver.py --recipe MODULE:FUNCTION --data FOLDER --num-layers 2 ...``: the others are those of
the job that it becomes, as Megatron-LM would have them. ``driver.py --plan FILE MOST < NAMES``
writes what recipes become.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import importlib
import json
import os
import re
import signal
import sys
import tomllib
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

from megatron_ttrace.jobs.commands.command_line import Command
from megatron_ttrace.jobs.shrink import bridge as sizes
from megatron_ttrace.jobs.shrink import plan
from megatron_ttrace.jobs.shrink.given import Given
from megatron_ttrace.trace import owned
from megatron_ttrace.trace.errors import TTraceError

PACKAGE = "megatron.bridge.recipes"
_VOCABULARY = 128
_SECONDS = 120
_RANKS = re.compile(r"_(\d+)gpu_")
_NAMES = ("hf_model_id", "hf_model_revision", "hf_source_path", "env_vars")
"""Fields that are about a model's files, or about a machine."""


OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
"""Variables without which libraries wait for a hub that cannot be reached."""


class NoHubError(Exception):
    """Something that only a model hub has."""


def hub_configuration(path: str, **_: Any) -> Any:
    """The configuration of a model on the hub: with the sizes that its class has by itself."""
    classes: Any = importlib.import_module("transformers").CONFIG_MAPPING
    auto: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    models = tomllib.loads(Path(__file__).with_name("models.toml").read_text())["model"]
    model = next((one for one in models if fnmatch.fnmatchcase(str(path), one["pattern"])), None)
    if model is None or model["type"] not in classes:
        raise NoHubError(f"{path}: transformers has no configuration of this class")
    kind = model["type"]
    names = [
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    ]
    if hasattr(classes[kind](), "vision_config"):
        names.reverse()
    architecture = model.get("architecture") or (names[0].get(kind) or names[1].get(kind))
    if architecture is None:
        raise NoHubError(f"{path}: transformers has no model of this class")
    return classes[kind](architectures=[architecture], **model.get("fields", {}))


def build(name: str) -> Any:
    """The configuration of a recipe, ``MODULE:FUNCTION``, at its full size."""
    from megatron.bridge import AutoBridge
    from megatron.bridge.training.mixed_precision import get_mixed_precision_config

    transformers: Any = importlib.import_module("transformers")

    def refuse(path: str, **_: Any) -> Any:
        raise NoHubError(f"{path}: its processor is on the hub")

    def bridge(path: str, **_: Any) -> Any:
        return AutoBridge.from_hf_config(hub_configuration(path))

    replaced = [
        (AutoBridge, "from_hf_pretrained", bridge),
        (transformers.AutoConfig, "from_pretrained", hub_configuration),
        (transformers.AutoProcessor, "from_pretrained", refuse),
        # Recipes only want to know how many tokens it has.
        (transformers.AutoTokenizer, "from_pretrained", lambda path, **_: range(_VOCABULARY)),
    ]
    module, _, function = name.partition(":")
    with ExitStack() as stack:
        for owner, attribute, value in replaced:
            stack.enter_context(mock.patch.object(owner, attribute, value))
        cfg = getattr(importlib.import_module(f"{PACKAGE}.{module}"), function)()
    if isinstance(cfg.mixed_precision, str):
        cfg.mixed_precision = get_mixed_precision_config(cfg.mixed_precision)
    return cfg


def kind_of(cfg: Any) -> str:
    """Pretraining, ``sft`` or ``peft``, by what it trains and on what."""
    if cfg.peft is not None:
        return "peft"
    return "sft" if hasattr(cfg.dataset, "preprocessing") else "pretrain"


def make_small(cfg: Any, arguments: list[str], data: Path) -> None:
    """A few steps on own data, in the sizes of ``arguments``; nothing is loaded, saved or logged.

    Raises:
        NoHubError: when its data needs a processor.
        TTraceError: when it is no model of text.
    """
    from megatron.bridge.training.config import GPTDatasetConfig, GPTSFTDatasetConfig

    if hasattr(cfg.dataset, "hf_processor_path"):
        raise NoHubError("the processor of its images or sound is on the hub")
    if not isinstance(cfg.dataset, GPTDatasetConfig | GPTSFTDatasetConfig):
        raise TTraceError(f"{type(cfg.dataset).__name__}: it trains on something else than text")
    sizes.apply(cfg, arguments)
    for name, value in vars(cfg.model).items():
        # Some models have further tables of the same size.
        if value == cfg.model.vocab_size and isinstance(value, int) and value > _VOCABULARY:
            setattr(cfg.model, name, _VOCABULARY)
    cfg.tokenizer.vocab_size = _VOCABULARY - 2
    cfg.dataset.num_workers = 0
    cfg.dataset.persistent_workers = False
    if kind_of(cfg) == "pretrain":
        cfg.tokenizer.tokenizer_type = "NullTokenizer"
        cfg.tokenizer.tokenizer_model = None
        cfg.dataset.blend = cfg.dataset.blend_per_split = None
    else:
        cfg.tokenizer.tokenizer_type = "HuggingFaceTokenizer"
        cfg.tokenizer.tokenizer_model = str(data)
        cfg.tokenizer.hf_tokenizer_kwargs = {}
        dataset = cfg.dataset
        dataset.hf_dataset = dataset.hf_validation_dataset = dataset.hf_test_dataset = None
        dataset.hf_validation_proportion = dataset.hf_output_root = None
        is_chat = type(dataset.preprocessing).__name__.startswith("Chat")
        dataset.dataset_root = data / ("chat" if is_chat else "prompt")
        dataset.do_validation = dataset.do_test = False
        if dataset.offline_packing_specs is not None:
            dataset.offline_packing_specs.packed_sequence_size = dataset.seq_length
    cfg.train.train_iters = 2
    cfg.train.train_samples = None
    schedule = cfg.scheduler
    schedule.lr_warmup_iters = schedule.lr_warmup_samples = 0
    schedule.lr_decay_iters = schedule.lr_decay_samples = schedule.lr_warmup_fraction = None
    schedule.lr_wsd_decay_iters = 1 if schedule.lr_decay_style == "WSD" else None
    cfg.validation.eval_iters = 0
    cfg.logger.log_interval = 1
    cfg.logger.tensorboard_dir = cfg.logger.wandb_project = None
    cfg.checkpoint.save = cfg.checkpoint.load = cfg.checkpoint.pretrained_checkpoint = None
    cfg.checkpoint.async_save = False


def _train(name: str, arguments: list[str], data: Path) -> None:
    from megatron.bridge.training import setup
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    cfg = build(name)
    make_small(cfg, arguments, data)
    if cfg.peft is not None:
        # The weights of a checkpoint would only be other start values.
        cfg.checkpoint.pretrained_checkpoint = str(data / "start")
        setup.checkpoint_exists = lambda *_, **__: True
        setup._load_checkpoint_from_path = lambda *_, **__: None
    pretrain(cfg, forward_step)


def _planned(name: str, most: int) -> dict[str, Any]:
    """What a recipe becomes, as :class:`discover.Planned` has it."""
    jobs: list[dict[str, Any]] = []
    lost: tuple[str, ...] = ()
    why, kind = "", "TRAINING"
    try:
        cfg = build(name)
        ranks = _RANKS.search(name)
        # A recipe for one GPU is shown to its users to grow by data parallelism.
        many = int(ranks[1]) if ranks and ranks[1] != "1" else None
        layers = sizes.divisible(cfg)
        command = Command(__file__, (*sizes.words(cfg), *layers), ranks=many)
        small = plan.shrink(command, most)
        lost = small.lost
        for job in small.jobs:
            cfg = build(name)
            make_small(cfg, list(job.arguments), Path("data"))
            jobs.append(
                {"arguments": job.arguments, "ranks": job.axes.ranks, "digest": _digest(cfg)}
            )
    except (NoHubError, OSError) as error:
        why, kind = str(error), "HUB"
    except NotImplementedError as error:
        why, kind = str(error), "REFUSED"
    except TTraceError as error:
        why, kind = str(error), "NOT_SHRUNK"
    except Exception as error:  # noqa: BLE001 - it is reported, and other recipes go on
        why, kind = f"{type(error).__name__}: {error}", "NOT_SHRUNK"
    why = " ".join(why.split())[:300]
    return {"name": name, "kind": kind, "jobs": jobs, "lost": lost, "why": why}


def _digest(cfg: Any) -> str:
    """The same for configurations that are the same, but for names."""
    found = {}
    for field in dataclasses.fields(cfg):
        part = getattr(cfg, field.name)
        values = vars(part) if hasattr(part, "__dict__") else {"": part}
        for name, value in values.items():
            if name not in _NAMES and field.name not in _NAMES:
                found[f"{field.name}.{name}"] = re.sub(r" at 0x\w+", "", repr(value))
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:12]


def _plan(file: Path, most: int, names: list[str]) -> None:
    """Append a line for each recipe; each is built in a child, which may crash or hang."""
    from megatron_ttrace.jobs import job

    job.prepare(script=Path(__file__))
    importlib.import_module(PACKAGE)
    for name in names:
        child = os.fork()
        if not child:
            signal.alarm(_SECONDS)
            line = json.dumps(_planned(name, most), default=str)
            with open(owned.append(file), "a", encoding="utf-8") as out:
                print(line, file=out, flush=True)
            os._exit(0)
        os.waitpid(child, 0)


def main(words: list[str]) -> None:
    """See above."""
    if words[0] == "--plan":
        _plan(Path(words[1]), int(words[2]), sys.stdin.read().split())
    else:
        given = Given.parse(words)
        own = ("--recipe", "--data")
        flags = [word for flag in given.flags if flag.name not in own for word in flag.words()]
        recipe, data = (next(f.values[0] for f in given.flags if f.name == name) for name in own)
        _train(recipe, flags, Path(data))


if __name__ == "__main__":
    main(sys.argv[1:])
