# SPDX-License-Identifier: Apache-2.0
"""Check combinations of options around a job; reduce those that diverge to what they need."""
