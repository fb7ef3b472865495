# SPDX-License-Identifier: Apache-2.0
"""The rules by which other tools call two tensors the same, on the tensors that we captured."""
