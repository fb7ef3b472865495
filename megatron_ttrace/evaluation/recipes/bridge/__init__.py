# SPDX-License-Identifier: Apache-2.0
"""The recipes of an installed Megatron-Bridge, shrunk."""
