# SPDX-License-Identifier: Apache-2.0
"""Train with an input of the model that is not the reference's.

``MISFED`` names the argument: it is rolled by one on several ranks. A single device, the reference,
runs Megatron as it is.
"""

import os
import sys
from pathlib import Path

import megatron_ttrace

megatron_ttrace.enable()

from megatron.core.models.gpt import GPTModel  # noqa: E402

ORDER = ("input_ids", "position_ids", "attention_mask")
forward = GPTModel.__call__


def misfed(self, *args, **kwargs):
    """Roll one of the arguments by one position."""
    name = os.environ["MISFED"]
    args = [value.roll(1, -1) if name == ORDER[at] else value for at, value in enumerate(args)]
    if name in kwargs:
        kwargs[name] = kwargs[name].roll(1, -1)
    return forward(self, *args, **kwargs)


if int(os.environ.get("WORLD_SIZE", "1")) > 1:
    GPTModel.__call__ = misfed

sys.path.insert(0, str(Path(__file__).parents[2] / "launch"))
import pretrain_gpt  # noqa: E402

pretrain_gpt.main()
