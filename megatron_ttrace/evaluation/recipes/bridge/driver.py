# SPDX-License-Identifier: Apache-2.0
"""Train a recipe of Megatron-Bridge, made small, without a model hub.

``driver.py --recipe MODULE:FUNCTION --data FOLDER --num-layers 2 ...``: the others are those of
the job that it becomes, as Megatron-LM would have them. ``driver.py --plan FILE MOST < NAMES``
writes what recipes become.
"""

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
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

from megatron_ttrace.evaluation.recipes.collect import Answer, Recipe, SmallJob
from megatron_ttrace.jobs.commands.command_line import Command
from megatron_ttrace.jobs.shrink import bridge as sizes
from megatron_ttrace.jobs.shrink import plan
from megatron_ttrace.jobs.shrink.command_flags import CommandFlags
from megatron_ttrace.trace import codec, owned
from megatron_ttrace.trace.errors import TTraceError

PACKAGE = "megatron.bridge.recipes"
_SECONDS = 120
_RECIPE = "--recipe"
_RANKS = re.compile(r"_(\d+)gpu_")
_NAMES = ("hf_model_id", "hf_model_revision", "hf_source_path", "env_vars")
"""Fields that are about a model's files, or about a machine."""


OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
"""Variables without which libraries wait for a hub that cannot be reached."""


@dataclasses.dataclass(frozen=True, slots=True)
class Planned:
    """What a recipe, called ``MODULE:FUNCTION``, becomes.

    ``digests``, of its jobs, are the same for equal configurations.
    """

    recipe: Recipe
    digests: tuple[str, ...]


class NoHubError(Exception):
    """Something that only a model hub has."""


def hub_configuration(path: str, **_: Any) -> Any:
    """The configuration of a model on the hub: with the sizes that its class has by itself."""
    classes: Any = importlib.import_module("transformers").CONFIG_MAPPING
    auto: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    models = tomllib.loads(Path(__file__).with_name("models.toml").read_text())["model"]
    model = next(
        (entry for entry in models if fnmatch.fnmatchcase(str(path), entry["pattern"])), None
    )
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
        (transformers.AutoTokenizer, "from_pretrained", lambda path, **_: range(sizes.VOCABULARY)),
    ]
    module, _, function = name.partition(":")
    with ExitStack() as stack:
        for owner, attribute, value in replaced:
            stack.enter_context(mock.patch.object(owner, attribute, value))
        cfg = getattr(importlib.import_module(f"{PACKAGE}.{module}"), function)()
    return cfg


def make_small(cfg: Any, arguments: Sequence[str]) -> None:
    """As :func:`sizes.make_small`; raises ``NoHubError`` when its data needs a processor."""
    if hasattr(cfg.dataset, "hf_processor_path"):
        raise NoHubError("the processor of its images or sound is on the hub")
    sizes.make_small(cfg, arguments)


def _train(name: str, arguments: list[str]) -> None:
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    cfg = build(name)
    make_small(cfg, arguments)
    pretrain(cfg, forward_step)


def _planned(name: str, most: int) -> Planned:
    jobs: list[SmallJob] = []
    digests: list[str] = []
    lost: tuple[str, ...] = ()
    answer: Answer | None = None
    why = ""
    try:
        cfg = build(name)
        ranks = _RANKS.search(name)
        # A recipe for one GPU is shown to its users to grow by data parallelism.
        many = int(ranks[1]) if ranks and ranks[1] != "1" else None
        layers = sizes.divisible(cfg)
        command = Command(__file__, (*sizes.words(cfg), *layers), ranks=many)
        small = plan.of_flags(command, most)
        lost = small.lost
        for job in small.jobs:
            cfg = build(name)
            make_small(cfg, [*job.arguments, sizes.DATA, "data"])
            words = (_RECIPE, name, *job.arguments)
            jobs.append(SmallJob(__file__, words, job.axes.ranks, ()))
            digests.append(_digest(cfg))
    except (NoHubError, OSError) as error:
        why, answer = str(error), Answer.HUB
    except NotImplementedError as error:
        why, answer = str(error), Answer.REFUSED
    except TTraceError as error:
        why, answer = str(error), Answer.COULD_NOT_CHECK
    except Exception as error:  # noqa: BLE001 - it is reported, and other recipes go on
        why, answer = f"{type(error).__name__}: {error}", Answer.COULD_NOT_CHECK
    why = " ".join(why.split())[:300]
    return Planned(Recipe(name, tuple(jobs), answer, why, lost), tuple(digests))


def _digest(cfg: Any) -> str:
    """The same for configurations that are the same, but for names."""
    values_by_name = {}
    for field in dataclasses.fields(cfg):
        part = getattr(cfg, field.name)
        values = vars(part) if hasattr(part, "__dict__") else {"": part}
        for name, value in values.items():
            if name not in _NAMES and field.name not in _NAMES:
                values_by_name[f"{field.name}.{name}"] = re.sub(r" at 0x\w+", "", repr(value))
    return hashlib.sha256(json.dumps(values_by_name, sort_keys=True).encode()).hexdigest()[:12]


def _plan(file: Path, most: int, names: list[str]) -> None:
    """Append a line for each recipe; each is built in a child, which may crash or hang."""
    from megatron_ttrace.jobs import job

    job.prepare(script=Path(__file__))
    importlib.import_module(PACKAGE)
    for name in names:
        child = os.fork()
        if not child:
            signal.alarm(_SECONDS)
            line = json.dumps(codec.encode(_planned(name, most)))
            with open(owned.append(file), "a", encoding="utf-8") as out:
                print(line, file=out, flush=True)
            os._exit(0)
        os.waitpid(child, 0)


def main(words: list[str]) -> None:
    """See above."""
    if words[0] == "--plan":
        _plan(Path(words[1]), int(words[2]), sys.stdin.read().split())
    else:
        parsed = CommandFlags.parse(words)
        flags = [word for flag in parsed.flags if flag.name != _RECIPE for word in flag.words()]
        _train(next(flag.values[0] for flag in parsed.flags if flag.name == _RECIPE), flags)


if __name__ == "__main__":
    main(sys.argv[1:])
