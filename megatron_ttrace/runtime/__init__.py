# SPDX-License-Identifier: Apache-2.0
"""A run from its first line to its verdict."""
