# SPDX-License-Identifier: Apache-2.0
"""Every night: known bugs, healthy configurations, recipes, a hunt; results, and what changed."""
