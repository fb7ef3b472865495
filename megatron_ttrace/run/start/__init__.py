# SPDX-License-Identifier: Apache-2.0
"""The same parameters, moments and token ids for every layout."""
