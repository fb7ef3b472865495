# SPDX-License-Identifier: Apache-2.0
"""How good the checker is: known bugs, mutants, the matrix, other tools' rules."""
