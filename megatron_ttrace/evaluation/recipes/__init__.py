# SPDX-License-Identifier: Apache-2.0
"""All training configurations of a Megatron-LM checkout, shrunk and checked."""
