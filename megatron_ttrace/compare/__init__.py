# SPDX-License-Identifier: Apache-2.0
"""Differences between candidate and reference: measured on every rank, judged on one."""
