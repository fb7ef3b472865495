# SPDX-License-Identifier: Apache-2.0
"""Methods of dataclasses are compiled once, not in every process that imports torch and Megatron.

``dataclasses`` writes the text of each method and compiles it: about 2,700 in what a check imports,
a tenth of the time. Python keeps the bytecode of modules in ``__pycache__``, but not this. Here it
is kept there too, as a module that is never run, for the texts that it was compiled from.
"""

import builtins
import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import json
import py_compile
import sys
import tempfile
from collections.abc import Iterator
from importlib.machinery import SourcelessFileLoader
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from megatron_ttrace.trace import owned

_WORTH = 0.1
"""Share of new texts from which on all are compiled for the next run."""


class Methods:
    """The code of dataclasses' methods, in a file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._known = _read(file)
        self._texts: dict[str, str] = {}
        self._new = 0

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Dataclasses that are defined in this context take their methods from the file.

        Afterwards it has those that were defined in all contexts, if many of them were new.
        """
        # The module's own name goes before Python's.
        vars(dataclasses)["exec"] = self._execute
        try:
            yield
        finally:
            del vars(dataclasses)["exec"]
            if self._new > _WORTH * len(self._texts) and not sys.dont_write_bytecode:
                self._new = 0
                _write(self._file, self._texts)

    def _execute(self, text: str, variables: dict[str, Any], names: dict[str, Any]) -> None:
        digest = hashlib.sha256(text.encode()).hexdigest()
        self._texts[digest] = text
        if (code := self._known.get(digest)) is not None:
            names[code.co_name] = FunctionType(code, variables)
        else:
            self._new += 1
            builtins.exec(text, variables, names)  # noqa: S102 - as dataclasses does


@functools.cache
def methods() -> Methods:
    """Those of this process, beside the bytecode of this package."""
    return Methods(Path(importlib.util.cache_from_source(__file__)).with_suffix(".methods"))


def _read(file: Path) -> dict[str, CodeType]:
    """The code of functions by the digest of their texts; nothing if there is no such file."""
    try:
        module = SourcelessFileLoader("methods", str(file)).get_code("methods")
        digests, *constants = module.co_consts if module else ("[]",)
        codes = [constant for constant in constants if isinstance(constant, CodeType)]
        return dict(zip(json.loads(digests), codes, strict=True))
    except (OSError, ImportError, EOFError, ValueError, TypeError):
        return {}


def _write(file: Path, texts: dict[str, str]) -> None:
    """Compile texts of one function each."""
    source = "\n".join([repr(json.dumps([*texts])), *texts.values()])
    with contextlib.suppress(OSError), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "methods.py"
        owned.write(path, [source], sealed=False)
        mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
        py_compile.compile(str(path), str(file), "<string>", invalidation_mode=mode)
