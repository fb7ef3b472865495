# SPDX-License-Identifier: Apache-2.0
"""``enable()``: flags into Megatron's parser, the CPU backend where needed, hooks on ``--ttrace``.

Megatron's ``parse_args`` (megatron/training/arguments.py) is the one place that every entry
script passes before anything is built, in all supported releases. Releases differ in who calls it
(0.17: ``initialize_megatron``; 0.18+: ``parse_and_validate_args``), so the wrapped function
replaces the original in every module that imported it by name.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from megatron_ttrace import cpu
from megatron_ttrace.cpu import helpers_cpp
from megatron_ttrace.errors import DEBUG, ExitCode, TTraceError, one_line
from megatron_ttrace.mcore import flags, inputs, provenance

_enabled = False
_said: set[str] = set()


def enable() -> None:
    """See :func:`megatron_ttrace.enable`."""
    global _enabled
    if _enabled:
        return
    _enabled = True
    activate()
    with exits_on_user_error(unexpected=_is_checked()):
        if _is_checked():
            _check_versions()
        _wrap_parse_args()


def is_enabled() -> bool:
    """Whether :func:`enable` ran in this process."""
    return _enabled


def activate() -> None:
    """The part of :func:`enable` that must come before anything of Megatron is imported."""
    with exits_on_user_error(unexpected=_is_checked()):
        provenance.begin()
        if cpu.needed(_early_flags(sys.argv[1:]).ttrace_device):
            cpu.activate()


class exits_on_user_error:  # noqa: N801 - reads as a statement
    """Turns a :class:`TTraceError` into one line on stderr and exit code 2.

    Args:
        unexpected: whether other errors are turned, too. Python's own exit code for them is 1,
            which would say that the run diverged.
    """

    def __init__(self, *, unexpected: bool = False) -> None:
        self._unexpected = unexpected

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, TTraceError):
            line = str(error)
        elif self._unexpected and isinstance(error, Exception):
            if os.environ.get(DEBUG):
                traceback.print_exception(error)
            line = f"could not begin: {one_line(error)} (set {DEBUG}=1 for the traceback)"
        else:
            return
        print(f"ttrace: {line}", file=sys.stderr, flush=True)
        raise SystemExit(int(ExitCode.COULD_NOT_CHECK)) from None


def _is_checked() -> bool:
    """Whether this process belongs to a run under check."""
    return bool(_early_flags(sys.argv[1:]).ttrace)


def _early_flags(argv: list[str]) -> argparse.Namespace:
    """The two flags that must be known before Megatron's parser can exist."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--ttrace", action="store_true")
    parser.add_argument("--ttrace-device", default="auto")
    return parser.parse_known_args(argv)[0]


def _check_versions() -> None:
    from megatron_ttrace.mcore.versions import check_supported

    check_supported()


def _wrap_parse_args() -> None:
    import megatron.training.arguments as arguments

    original = arguments.parse_args

    @functools.wraps(original)
    def parse_args(
        extra_args_provider: Callable[[Any], Any] | None = None, *rest: Any, **kwargs: Any
    ) -> argparse.Namespace:
        def with_ours(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
            if extra_args_provider is not None:
                parser = extra_args_provider(parser)
            return flags.add_arguments(parser)

        with exits_on_user_error(unexpected=_is_checked()):
            args: argparse.Namespace = original(with_ours, *rest, **kwargs)
            return _prepare(args)

    for module in list(sys.modules.values()):
        if getattr(module, "parse_args", None) is original:
            module.parse_args = parse_args  # type: ignore[attr-defined]


def _prepare(args: argparse.Namespace) -> argparse.Namespace:
    """Between Megatron's parsing and its validation: derive, adapt, install."""
    is_first = int(os.environ.get("RANK", "0")) == 0
    settings = flags.settings_from_args(args) if args.ttrace else None
    if settings is not None:
        inputs.require_regular_data(args)
        if settings.reference is not None:
            inputs.require_regular_folder(settings.reference)
        provenance.require_found()
        if not cpu.needed(args.ttrace_device):
            helpers_cpp.skip_compilation(where_impossible=True)
    if settings is not None and settings.role == "reference":
        from megatron_ttrace.mcore import reference_arguments

        reference_arguments.apply(args, settings)
    if cpu.needed(args.ttrace_device):
        # Megatron parses more than once (ft_integration.setup): say it once.
        line = cpu.banner(cpu.adapt_arguments(args))
        if is_first and line not in _said:
            _said.add(line)
            print(line, flush=True)
    if settings is None and args.ttrace_bug is not None and "bug" not in _said:
        _said.add("bug")
        # A known bug can also be trained with, unwatched: that is how it looks to a user today.
        from megatron_ttrace.runtime import injection

        injection.put_in(args.ttrace_bug)
    if settings is not None:
        from megatron_ttrace.runtime import loop

        loop.install(args, settings)
    return args
