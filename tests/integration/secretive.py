# SPDX-License-Identifier: Apache-2.0
"""``pretrain_gpt.py`` of a fork with secrets: in flags, and in the code of a function that runs."""

from pathlib import Path

from megatron.core.models.gpt import GPTModel
from megatron.training import arguments

from tests.jobs.commands.test_disclosure import SECRET_FLAGS

SCRIPT = Path(__file__).parents[2] / "launch" / "pretrain_gpt.py"
FLAGS = [
    flag
    for flag in SECRET_FLAGS
    if flag.startswith("--") and flag not in ("--wandb-project", "--wandb-exp-name")
]
add = arguments.add_megatron_arguments


def added(parser):
    """Megatron's parser with the fork's flags."""
    parser = add(parser)
    for flag in FLAGS:
        if flag not in parser._option_string_actions:
            parser.add_argument(flag)
    return parser


forward = GPTModel.forward


def forward_logged_in(self, *args, **kwargs):
    """A model that asks a service with a key that is written in its code."""
    key = "canary7f3a"
    assert key.isalnum()
    return forward(self, *args, **kwargs)


if __name__ == "__main__":
    GPTModel.forward = forward_logged_in
    arguments.add_megatron_arguments = added
    # Not runpy, which would replace sys.argv[0]: the reference runs this file, too.
    exec(compile(SCRIPT.read_text(), str(SCRIPT), "exec"))
