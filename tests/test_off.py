# SPDX-License-Identifier: Apache-2.0
"""Without our flags a script on a machine with an accelerator is not touched."""

import json
import os
import subprocess
import sys

import pytest

import megatron_ttrace

PROGRAM = """
import builtins, importlib, json, os, signal, sys, threading

def state():
    return {
        "environment": dict(os.environ),
        "hooks": [repr(sys.excepthook), repr(sys.unraisablehook), repr(builtins.__import__),
                  len(sys.meta_path), len(sys.path_hooks), repr(sys.gettrace())],
        "path": list(sys.path),
        "signals": [repr(signal.getsignal(one)) for one in sorted(signal.valid_signals())],
        "threads": threading.active_count(),
        "argv": list(sys.argv),
    }

before, modules = state(), set(sys.modules)
import megatron_ttrace
megatron_ttrace._DEVICES = (os.devnull,)
megatron_ttrace.enable()
print(json.dumps({
    "same": state() == before,
    "modules": [name for name in sorted(set(sys.modules) - modules)
                if name.partition(".")[0] not in sys.stdlib_module_names],
}))
"""


def test_nothing_is_imported_or_set() -> None:
    """Importing and enabling imports no torch and no Megatron, and sets nothing."""
    words = [sys.executable, "-c", PROGRAM, "--num-layers", "2"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=True)
    found = json.loads(done.stdout)
    assert found == {"same": True, "modules": ["megatron_ttrace"]}


@pytest.mark.parametrize(
    ("words", "devices", "visible", "off"),
    [
        ([], os.devnull, None, True),
        (["--lr", "1"], os.devnull, "0,1", True),
        (["--ttrace"], os.devnull, None, False),
        (["--ttrace-device=cpu"], os.devnull, None, False),
        (["--help"], os.devnull, None, False),
        ([], "/nowhere", None, False),
        ([], os.devnull, "", False),
        ([], os.devnull, "-1", False),
    ],
)
def test_when_there_is_nothing_to_do(
    words: list[str],
    devices: str,
    visible: str | None,
    off: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None of our flags, and an accelerator that is not hidden."""
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    monkeypatch.setattr(megatron_ttrace, "_DEVICES", ("/nowhere", devices))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert megatron_ttrace._is_off() is off
