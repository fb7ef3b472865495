# SPDX-License-Identifier: Apache-2.0
"""Which modules are the culprits, and tested repairs that explain why."""
