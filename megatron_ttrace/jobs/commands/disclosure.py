# SPDX-License-Identifier: Apache-2.0
"""What of a command, of the environment and of Megatron's arguments may be in a file.

A list of what is allowed, because no pattern knows all secrets: a value is shown if its flag,
option or variable is known to be harmless, and is :data:`HIDDEN` otherwise. In values that are
shown, credentials in addresses are hidden.
"""

import contextlib
import hashlib
import os
import re
import shlex
import shutil
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_ttrace.jobs.settings import FLAGS, SWITCHES
from megatron_ttrace.mcore.options.decisions import option_of
from megatron_ttrace.mcore.options.roles import ROLES, VALUES, Role
from megatron_ttrace.trace import errors

HIDDEN = "***"

_SHOWN = {
    name: frozenset(words.split())
    for name, words in tomllib.loads(
        Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    ).items()
}
_SHOWN_ROLES = frozenset(
    {
        *(Role.CODE, Role.DATA, Role.SIZE, Role.AXIS, Role.LAYOUT, Role.TRANSPORT, Role.LENGTH),
        *(Role.INPUT, Role.CHECKPOINT, Role.OPERATION, Role.REFUSED),
    }
)
_FREE_TEXT = _SHOWN["free_text"]

_OUR_FLAGS = _SHOWN["our_flags"] | {flag.name for flag in FLAGS.values()} - SWITCHES
_LAUNCHER_VALUES = _SHOWN["launcher_flags"]
_SWITCHES = _SHOWN["switches"] | SWITCHES
_OF_COMMANDS = frozenset({"-c", "--against", "--into", "--ttrace-reference-args"})
"""Flags whose value is a command itself, or arguments."""
_PROGRAM = re.compile(
    r"([\w./-]*/)?(ttrace|torchrun|python[\d.]*|srun|mpirun|env|bash|sh|accelerate|timeout|nohup)"
    r"|cd|exec|export|set"
)
_SUBCOMMANDS = _SHOWN["subcommands"]
_SCRIPT = re.compile(r"[\w./-]+\.(py|sh|slurm|sbatch)")
_SEPARATORS = ";&|\n"
_FLAG = re.compile(r"--?[A-Za-z][\w.-]*")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_FIELD = re.compile(r"(\+{0,2}([a-z_]+)\.(\w+))=(.*)", re.DOTALL)
_ADDRESS = re.compile(r"([A-Za-z][\w+.-]*://)(?:[^\s]*@)?([^\s?#]*)([?#][^\s]*)?")

_VARIABLES = _SHOWN["variables"]


def is_shown(option: str | None) -> bool:
    """Whether an option of Megatron's may be shown with its value; ``None`` is an unknown one."""
    return option is not None and ROLES.get(option) in _SHOWN_ROLES and option not in _FREE_TEXT


def text(value: str) -> str:
    """A value that may be shown, without credentials and queries in its addresses."""

    def hide(match: re.Match[str]) -> str:
        scheme, place, query = match[1], match[2], match[3]
        user = f"{HIDDEN}@" if "@" in match[0] else ""
        return f"{scheme}{user}{place}{f'{query[0]}{HIDDEN}' if query else ''}"

    return _ADDRESS.sub(hide, value)


_NONE: Mapping[str, int] = MappingProxyType({})


def withhold(words: Sequence[str], known: Mapping[str, int] = _NONE) -> None:
    """Keep what must not be shown of a command out of the errors of this process.

    Words before the script that belong to no flag are shown there. ``known``: further flags, and
    how many values they have.
    """
    errors.withhold(_withheld(words, known))


def _withheld(words: Sequence[str], known: Mapping[str, int] = _NONE) -> Iterator[str]:
    for word, shown in zip(words, _shown(words, lambda word: word, known), strict=True):
        before, hides, _ = shown.partition(HIDDEN)
        hidden = word.removeprefix(before)
        if hides and shown != word and not os.path.exists(hidden):
            yield hidden
        # A line break among the words of a text is a separator, and a word.
        if re.search(r"\s", word) and not _is_separator(word):
            with contextlib.suppress(ValueError):
                yield from _withheld(_split(word))


def command(words: Sequence[str]) -> list[str]:
    """The words of a command, with :data:`HIDDEN` for values that may be secret.

    Flags stay, as do the launcher, the script, and assigned variables by name. Behind the script
    only values of known options are shown, as many as the option takes. A quoted command within a
    command is treated alike.
    """
    return _shown(words, _positional)


def _shown(
    words: Sequence[str], positional: Callable[[str], str], known: Mapping[str, int] = _NONE
) -> list[str]:
    """See :func:`command`; ``positional`` decides on words before the script."""
    shown: list[str] = []
    flag = ""
    remaining: int | None = 0  # values of the flag that may follow; None: any word may be one
    in_script = is_over = False
    for word in words:
        if is_over:
            shown.append(HIDDEN)
        elif _is_separator(word):
            shown.append(word)
            remaining = 0
        elif word == "--" or _FLAG.fullmatch(word.partition("=")[0]):
            is_over = in_script and word == "--"
            flag, equals, value = word.partition("=")
            remaining = known.get(flag, _values_of(flag, in_script=in_script))
            if remaining is None and not flag.startswith("--") and flag[2:]:
                # "-n4", "-pSECRET"
                is_known = not in_script and flag[:2] in _LAUNCHER_VALUES - _OF_COMMANDS
                glued = _value(flag[:2], flag[2:]) if is_known else HIDDEN
                flag, remaining = f"{flag[:2]}{glued}", 0 if is_known else None
            shown.append(
                f"{flag}={_value(flag, value) if remaining else HIDDEN}" if equals else flag
            )
            remaining = 0 if equals and remaining else remaining
        elif remaining:
            shown.append(_value(flag, word))
            remaining -= 1
        elif not in_script and (match := _ASSIGNMENT.fullmatch(word)):
            allowed = remaining == 0 and match[1] in _VARIABLES
            shown.append(f"{match[1]}={text(match[2]) if allowed else HIDDEN}")
        elif (remaining == 0 and _PROGRAM.fullmatch(word)) or (not in_script and _is_place(word)):
            shown.append(word)
            in_script = _SCRIPT.fullmatch(word) is not None
            remaining = 0
        elif in_script:
            shown.append(_override(word) if remaining == 0 else HIDDEN)
        else:
            shown.append(HIDDEN if remaining is None else positional(word))
    return shown


def _is_separator(word: str) -> bool:
    """Whether it ends a command in a shell's text: ``;``, ``&&``, a line's end."""
    return bool(word) and not word.strip(_SEPARATORS)


def _values_of(flag: str, *, in_script: bool) -> int | None:
    """How many words after a flag may be shown; ``None`` for a flag that is not known."""
    if flag in _SWITCHES:
        return 0
    if flag in _OUR_FLAGS or (flag in _LAUNCHER_VALUES and not in_script):
        return 1
    option = option_of(flag) if flag.startswith("--") else None
    return VALUES[option] if option is not None and is_shown(option) else None


def _value(flag: str, value: str) -> str:
    if value.startswith("-") and not (_NUMBER.fullmatch(value) or flag in _OF_COMMANDS):
        return HIDDEN
    if flag in _OF_COMMANDS and re.search(r"[\s=-]", value):
        return _nested(value)
    if not flag.startswith("--") and flag != "-m" and not _NUMBER.fullmatch(value):
        return HIDDEN
    return text(value)


def _positional(word: str) -> str:
    """A word before the script that is neither a value nor a program or file."""
    if word in _SUBCOMMANDS or _NUMBER.fullmatch(word):
        return word
    parts = word.split()
    is_command = any(_PROGRAM.fullmatch(part) or _SCRIPT.fullmatch(part) for part in parts[:-1])
    return _nested(word) if is_command else HIDDEN


def _override(word: str) -> str:
    """``SECTION.FIELD=VALUE``: a field of Megatron-Bridge's configuration, as recipes take it."""
    match = _FIELD.fullmatch(word)
    if match is None:
        return HIDDEN
    # Not earlier: its package imports torch.
    from megatron_ttrace.mcore.fronts import bridge_options

    if match[2] not in (*bridge_options.SECTIONS, *bridge_options.OTHERS):
        return HIDDEN
    # Switches are no secrets.
    allowed = match[4] in ("True", "False", "None")
    allowed |= is_shown(bridge_options.option_of(match[2], match[3]))
    return f"{match[1]}={text(match[4]) if allowed else HIDDEN}"


def _nested(value: str) -> str:
    try:
        shown = command(_split(value))
    except ValueError:
        return HIDDEN
    quoted = [word.strip() if _is_separator(word) else shlex.quote(word) for word in shown]
    return " ".join(word for word in quoted if word)


def _split(value: str) -> list[str]:
    """A shell's text as words and separators. Raises ``ValueError`` for an open quote."""
    lexer = shlex.shlex(value.replace("\\\n", " "), posix=True, punctuation_chars=_SEPARATORS)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    return list(lexer)


def _is_place(word: str) -> bool:
    """Whether a word before the script names it, a file that exists, or a program."""
    if "://" in word:
        return False
    if _PROGRAM.fullmatch(word) or re.fullmatch(r"[\w./-]+\.(py|sh|ya?ml|slurm|sbatch)", word):
        return True
    try:
        return os.path.exists(word) or shutil.which(word) is not None
    except (OSError, ValueError):
        return False


def environment(chosen: Mapping[str, str]) -> dict[str, str]:
    """Variables with the values that may be shown."""
    return {name: text(value) if name in _VARIABLES else HIDDEN for name, value in chosen.items()}


def identity(value: Any, *, allowed: bool) -> Any:
    """A JSON value for comparison: itself if it may be shown, else a digest of it.

    Switches and absent values are no secrets.
    """
    if value is None or isinstance(value, bool):
        return value
    if allowed:
        if isinstance(value, list):
            return [identity(item, allowed=True) for item in value]
        return text(value) if isinstance(value, str) else value
    return f"digest {hashlib.sha256(repr(value).encode()).hexdigest()[:12]}"
