# SPDX-License-Identifier: Apache-2.0
"""``--ttrace`` in a checkout of Megatron-LM, whose entry script is not part of any release."""
