# SPDX-License-Identifier: Apache-2.0
"""Weights in checkpoints, read without unpickling anything."""
