# SPDX-License-Identifier: Apache-2.0
"""A program: derive the reference of a job's arguments, and have Megatron validate it."""

import argparse
import sys

UNKNOWN = 3
"""Exit code: this release of Megatron lacks an option."""


def main() -> int:
    """On the CPU backend, as one rank."""
    from megatron_ttrace import cpu

    cpu.activate()
    from megatron.training import arguments as megatron

    from megatron_ttrace.cpu.arguments import adapt_arguments
    from megatron_ttrace.mcore.options import decisions

    parser = megatron.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    if unknown := parser.parse_known_args(sys.argv[1:])[1]:
        print(f"this release has no {unknown[0]}")
        return UNKNOWN
    args = megatron.parse_args()
    for name, value in decisions.derive(args).items():
        if hasattr(args, name):
            setattr(args, name, value)
    adapt_arguments(args)
    megatron.validate_args(args)
    from megatron.training.argument_utils import core_transformer_config_from_args

    config = core_transformer_config_from_args(args)
    assert config.tensor_model_parallel_size == 1
    assert args.data_parallel_size == 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
