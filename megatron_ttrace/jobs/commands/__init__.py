# SPDX-License-Identifier: Apache-2.0
"""Commands and scripts as users have them, read and never run."""
