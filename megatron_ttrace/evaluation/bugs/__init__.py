# SPDX-License-Identifier: Apache-2.0
"""Known bugs of Megatron, re-created to see that the checker finds them."""
