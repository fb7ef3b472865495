# SPDX-License-Identifier: Apache-2.0
"""What a fork runs every night: known bugs, the matrix, recipes."""
