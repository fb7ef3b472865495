# SPDX-License-Identifier: Apache-2.0
"""Run the training script and print the bits of every logged loss and gradient norm.

The last number of a line is that of all modules' hooks.

``bare`` runs Megatron on the CPU backend alone, with nothing else of this package in the process.
``spilling`` keeps no copy of the training state in memory, and prints how many bytes were in files.
"""

import gc
import os
import runpy
import sys

import megatron_ttrace

mode, script, *arguments = sys.argv[1:]
sys.argv = [script, *arguments]

if mode == "bare":
    from megatron_ttrace import cpu

    cpu.activate()
    import megatron.training.arguments as megatron_arguments

    parse = megatron_arguments.parse_args

    def parse_args(*args, **kwargs):
        """Megatron's own, with what a CPU cannot do switched off."""
        parsed = parse(*args, **kwargs)
        cpu.adapt_arguments(parsed)
        return parsed

    for module in list(sys.modules.values()):
        if getattr(module, "parse_args", None) is parse:
            module.parse_args = parse_args
    megatron_ttrace.enable = lambda: None
else:
    megatron_ttrace.enable()

if mode == "spilling":
    from megatron_ttrace.trace.budget import Budget
    from megatron_ttrace.trace.copies import Copies

    close = Copies.__exit__

    def told(copies, *error):
        """Tell how much was in a file."""
        print("COPIES", copies._end, flush=True)
        close(copies, *error)

    Budget.kept, Copies.__exit__ = 0, told

import megatron.training.training as training  # noqa: E402
import torch  # noqa: E402

HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks"),
)


def hooks() -> int:
    """How many hooks all modules have."""
    modules = [one for one in gc.get_objects() if isinstance(one, torch.nn.Module)]
    return sum(len(getattr(module, name)) for module in modules for name in HOOKS)


log = training.training_log
originals = training.setup_model_and_optimizer, training.train_step


def training_log(losses, *args, **kwargs):
    """Print the numbers as hexadecimal floats."""
    names = ["total", "rate", "iteration", "scale", "memory", "skipped", "norm"]
    given = dict(zip(names, args, strict=False))
    values = [float(value).hex() for value in losses.values()]
    untouched = originals == (training.setup_model_and_optimizer, training.train_step)
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        # A step that an overflow skips has none.
        norm = "skipped" if given["norm"] is None else float(given["norm"]).hex()
        print("BITS", given["iteration"], *values, norm, hooks(), flush=True)
        print("LOOP", "untouched" if untouched else "watched", flush=True)
    return log(losses, *args, **kwargs)


training.training_log = training_log
runpy.run_path(script, run_name="__main__")
