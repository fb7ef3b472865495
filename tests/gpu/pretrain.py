# SPDX-License-Identifier: Apache-2.0
"""``launch/pretrain_gpt.py`` for the tests of ``make gpu``.

With ``TTRACE_TEST_TRANSPORT=host`` in the environment all ranks share the first GPU, and their
collectives go over gloo, staged through the host (tests/gpu/transport.py). Where there is no GPU,
tensors of the CPU are staged, so that this too is tried.
"""

import os
import runpy
from pathlib import Path

if os.environ.get("TTRACE_TEST_TRANSPORT") == "host":
    import torch

    from tests.gpu import transport

    has_gpu = torch.cuda.is_available()
    transport.install(lambda tensor: tensor.is_cuda or not has_gpu)
    os.environ["LOCAL_RANK"] = "0"

runpy.run_path(str(Path(__file__).parents[2] / "launch" / "pretrain_gpt.py"), run_name="__main__")

if os.environ.get("TTRACE_TEST_MEMORY"):
    import json
    import resource

    import torch

    peak = {"host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if torch.cuda.is_available():
        peak["device_bytes"] = torch.cuda.max_memory_allocated()
    print("test memory:", json.dumps(peak), flush=True)
