# SPDX-License-Identifier: Apache-2.0
"""Single faults put into Megatron's parallel code, to see that the checker finds them."""
