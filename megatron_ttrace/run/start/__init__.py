# SPDX-License-Identifier: Apache-2.0
"""The same parameters and moments for every layout."""
