# SPDX-License-Identifier: Apache-2.0
"""Ranks, the fork server, signals, logs and waiting."""
