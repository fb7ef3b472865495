# SPDX-License-Identifier: Apache-2.0
"""Every night: known bugs, healthy configurations, mutants; what came out, and what changed."""
