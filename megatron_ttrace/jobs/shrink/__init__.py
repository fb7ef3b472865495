# SPDX-License-Identifier: Apache-2.0
"""The smallest jobs that run the same code as a large one. Pure functions of its arguments."""
