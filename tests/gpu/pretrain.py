# SPDX-License-Identifier: Apache-2.0
"""``launch/pretrain_gpt.py`` for the tests of ``make gpu``.

Megatron compiles its dataset helpers even where a wheel brings them, and ends without ``make``'s
file; here it does not. In the environment:

- ``TTRACE_TEST_TRANSPORT=host``: all ranks share the first GPU, and their collectives go over gloo,
  staged through the host (tests/gpu/transport.py). Without a GPU, tensors of the CPU are staged.
- ``TTRACE_TEST_BITS=1``: the bits of every loss are printed (tests/assay/planted/train.py).
- ``TTRACE_TEST_MEMORY=1``: the peak of memory is printed.
"""

import json
import os
import resource
import runpy
from pathlib import Path

import torch

from megatron_ttrace.cpu import helpers_cpp

ROOT = Path(__file__).parents[2]

helpers_cpp.skip_compilation()
if os.environ.get("TTRACE_TEST_TRANSPORT") == "host":
    from tests.gpu import transport

    has_gpu = torch.cuda.is_available()
    transport.install(lambda tensor: tensor.is_cuda or not has_gpu)
    os.environ["LOCAL_RANK"] = "0"

script = str(ROOT / "launch" / "pretrain_gpt.py")
if os.environ.get("TTRACE_TEST_BITS"):
    os.environ["TTRACE_TEST_ORDER"] = json.dumps({"bits": True})
    script = str(ROOT / "tests" / "assay" / "planted" / "train.py")
runpy.run_path(script, run_name="__main__")

if os.environ.get("TTRACE_TEST_MEMORY"):
    peak = {"host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if torch.cuda.is_available():
        peak["device_bytes"] = torch.cuda.max_memory_allocated()
    print("test memory:", json.dumps(peak), flush=True)
