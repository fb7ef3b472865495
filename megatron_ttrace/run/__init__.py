# SPDX-License-Identifier: Apache-2.0
"""What happens inside a rank: the traced steps of a candidate and of a reference."""
