# SPDX-License-Identifier: Apache-2.0
"""Metadata is in pyproject.toml; this takes two folders along, and compiles C files if it can."""

import shutil
import sys
import zlib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

# pip looks for dependencies first, and would list the versions of each that need a newer Python.
if sys.version_info < (3, 12):  # noqa: UP036 - setup.py runs whatever pip runs in
    sys.exit(
        "megatron-ttrace needs Python 3.12 or newer, as megatron-core does; this is "
        f"{sys.version_info[0]}.{sys.version_info[1]}: use another (python3.12 -m venv .venv)"
    )

HERE = Path(__file__).parent
BESIDE_THE_PACKAGE = ("patches", "launch")


class BuildWithResources(build_py):
    """Puts ``patches/`` and ``launch/`` into wheels, where ``jobs/resources.py`` finds them."""

    def run(self) -> None:
        """Copy after the modules; an editable install reads the checkout instead."""
        super().run()
        if self.editable_mode:
            return
        for name in BESIDE_THE_PACKAGE:
            target = Path(self.build_lib, "megatron_ttrace", f"_{name}")
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(HERE / name, target, ignore=shutil.ignore_patterns("__pycache__"))


COMPILED = [
    Extension(
        f"megatron_ttrace.{room}._{name}",
        [source := f"megatron_ttrace/{room}/{name}.c"],
        # So that a checkout notices that its compiled file is of another version.
        define_macros=[("TTRACE_SOURCE", f"{zlib.crc32((HERE / source).read_bytes())}u")],
        extra_compile_args=["-O3"],
        optional=True,  # without a C compiler there is slower Python, or no protection
    )
    for room, name in (("compare", "sums"), ("trace", "mapped"), ("trace", "aborts"))
]

setup(cmdclass={"build_py": BuildWithResources}, ext_modules=COMPILED)
