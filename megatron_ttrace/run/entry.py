# SPDX-License-Identifier: Apache-2.0
"""``enable()``: adds our flags to Megatron's parser, and the CPU backend if there is no GPU.

All entry scripts call Megatron's ``parse_args`` (megatron/training/arguments.py) before anything is
built. The wrapped function replaces the original in every module that imported it by name.
"""

import argparse
import contextlib
import functools
import importlib
import json
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from megatron_ttrace import cpu
from megatron_ttrace.cpu import helpers_cpp
from megatron_ttrace.cpu.stand_in import replace_everywhere
from megatron_ttrace.jobs import argv, failures, inputs, opened, provenance, script
from megatron_ttrace.jobs.settings import Early, Settings, add_arguments, settings_of, split
from megatron_ttrace.jobs.shrink import bridge as small
from megatron_ttrace.mcore import fronts
from megatron_ttrace.mcore.arguments import MegatronArguments
from megatron_ttrace.mcore.fronts import bridge_small
from megatron_ttrace.mcore.fronts.bridge import Bridge
from megatron_ttrace.mcore.options import decisions
from megatron_ttrace.mcore.replaced import wrap
from megatron_ttrace.trace import ends, owned
from megatron_ttrace.trace.errors import DEBUG, ExitCode, TTraceError, one_line

_DATASETS = "megatron.core.datasets.utils"
_enabled = False
_said: set[str] = set()


def enable() -> None:
    """See :func:`megatron_ttrace.enable`."""
    global _enabled
    if _enabled:
        return
    _enabled = True
    argv.remember()
    opened.watch()
    activate()
    with exits_on_user_error(unexpected=_is_checked()):
        if _is_checked():
            from megatron_ttrace.mcore.samples import write_indices_at_once
            from megatron_ttrace.mcore.versions import check_supported

            check_supported()
            write_indices_at_once()
        if script.BRIDGE not in sys.modules:
            importlib.import_module(script.PARSER)
        script.when_imported(script.PARSER, _wrap_parse_args)
        script.when_imported(script.BRIDGE, _wrap_configuration)


def is_enabled() -> bool:
    """Whether :func:`enable` ran in this process."""
    return _enabled


def activate() -> None:
    """The part of :func:`enable` that must run before Megatron is imported."""
    with exits_on_user_error(unexpected=_is_checked()):
        provenance.begin()
        if cpu.needed(_early().device):
            cpu.activate()
            # A loop of its own calls it too, without Megatron's arguments.
            script.when_imported(_DATASETS, helpers_cpp.skip_compilation)


@contextlib.contextmanager
def exits_on_user_error(*, unexpected: bool = False) -> Iterator[None]:
    """Turn a :class:`TTraceError` into one line on standard error and exit code 2.

    If ``unexpected``, also any other error. Python's own exit code for these is 1, which would mean
    that the run diverged.
    """
    code = int(ExitCode.COULD_NOT_CHECK)
    try:
        yield
        return
    except TTraceError as error:
        ends.tell(str(error), code)
    except Exception as error:
        if not unexpected:
            raise
        if os.environ.get(DEBUG):
            traceback.print_exception(error)
        if (record := failures.record_of(error, code)).frames:
            ends.write(record)
        ends.tell(f"could not start: {one_line(error)} (set {DEBUG}=1 for the traceback)", code)
    raise SystemExit(code)


def _is_checked() -> bool:
    """Whether this process belongs to a run under check."""
    return _early().is_checked


def _early() -> Early:
    return Early.read(argv.words())


def _wrap_parse_args() -> None:
    import megatron.training.arguments as arguments

    original = arguments.parse_args

    @functools.wraps(original)
    def parse_args(
        extra_args_provider: Callable[[Any], Any] | None = None, *rest: Any, **kwargs: Any
    ) -> MegatronArguments:
        def with_ours(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
            if extra_args_provider is not None:
                parser = extra_args_provider(parser)
            return add_arguments(parser)

        with exits_on_user_error(unexpected=_is_checked()):
            # With --yaml-cfg Megatron's parser would lose our flags.
            for why in decisions.refusals(_early()) if _is_checked() else ():
                raise TTraceError(why)
            with argv.put_back():
                args: MegatronArguments = original(with_ours, *rest, **kwargs)
            settings = settings_of(args) if _is_checked() else None
            if settings is not None:
                require_unshrunk(settings)
            _adapt(args, settings)
            if settings is not None:
                _watch(settings)
            return args

    replace_everywhere("parse_args", original, parse_args)


def _wrap_configuration() -> None:
    """Megatron-Bridge's ``runtime_config_update``, the first that its ``pretrain`` calls."""

    def update(original: Callable[[Any], None], cfg: Any) -> None:
        with exits_on_user_error(unexpected=_is_checked()):
            settings = split(argv.ours())[0] if _is_checked() else None
            if settings is not None:
                _shrink(cfg, settings)
            front = Bridge(cfg)
            _adapt(front.arguments(), settings)
            if settings is None:
                original(cfg)
                return
            is_reference = settings.role == "reference"
            front.update(original, reference=is_reference, exits=settings.exit_after)
            fronts.use(front)
            _watch(settings)

    wrap(importlib.import_module(script.BRIDGE), "runtime_config_update", update)


def require_unshrunk(settings: Settings) -> None:
    """Raise ``TTraceError`` to shrink a job that has no configuration of Megatron-Bridge."""
    if settings.role == "plan" or settings.small is not None:
        raise TTraceError("only configurations that pretrain() of Megatron-Bridge gets are shrunk")


def _shrink(cfg: Any, settings: Settings) -> None:
    """Write what flags a configuration stands for, and end; or change it as we were asked to."""
    if settings.role == "plan" and settings.overrides is not None:
        bridge_small.require_text(cfg)
        owned.write(settings.overrides, [json.dumps(small.words(cfg))])
        raise SystemExit(0)
    if settings.small is not None:
        words = shlex.split(settings.small.read_text(encoding="utf-8"))
        small.make_small(cfg, words, max(2, *settings.iterations))
    if settings.plain:
        bridge_small.make_plain(cfg)


def _watch(settings: Settings) -> None:
    from megatron_ttrace.run import loop

    loop.install(settings)


def _adapt(args: MegatronArguments, settings: Settings | None) -> None:
    """Adapt options before they are validated."""
    is_first = int(os.environ.get("RANK", "0")) == 0
    early = _early()
    if settings is not None:
        settings.require_valid()
        inputs.require_regular_data(args)
        provenance.require_found()
        if not cpu.needed(early.device):
            helpers_cpp.skip_compilation(where_impossible=True)
    if settings is not None and settings.role == "reference":
        from megatron_ttrace.jobs import reference_arguments

        reference_arguments.apply(args, settings)
    elif settings is not None and settings.exit_after:
        decisions.silence(args, reports=settings.role == "candidate")
    if cpu.needed(early.device):
        # Megatron parses more than once (ft_integration.setup): print it once.
        line = cpu.banner(cpu.adapt_arguments(args))
        if is_first and line not in _said:
            _said.add(line)
            print(line, flush=True)
    if settings is None and early.bug is not None and "bug" not in _said:
        _said.add("bug")
        # A known bug also works in training without a check, as users meet it.
        from megatron_ttrace.run import loop

        loop.introduce(early.bug)
