# SPDX-License-Identifier: Apache-2.0
"""All commands. Parsing imports neither torch nor Megatron; a command does so when it runs."""
