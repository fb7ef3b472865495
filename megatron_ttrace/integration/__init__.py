# SPDX-License-Identifier: Apache-2.0
"""Where megatron_ttrace meets Megatron's training loop, and nowhere else."""
