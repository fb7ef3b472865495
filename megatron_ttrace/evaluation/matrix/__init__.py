# SPDX-License-Identifier: Apache-2.0
"""Healthy configurations: every one must come out equivalent."""
