# SPDX-License-Identifier: Apache-2.0
"""Real training data without a download: text files as Megatron's ``.bin`` and ``.idx``."""
