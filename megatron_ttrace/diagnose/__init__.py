# SPDX-License-Identifier: Apache-2.0
"""Which module is to blame, and tested repairs that say why."""
