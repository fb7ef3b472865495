# SPDX-License-Identifier: Apache-2.0
"""Other tools' rules on the tensors of a check."""
