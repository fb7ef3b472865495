# SPDX-License-Identifier: Apache-2.0
"""Equal starts: both runs begin from the same parameter values, whatever their layouts."""
