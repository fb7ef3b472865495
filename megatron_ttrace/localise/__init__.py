# SPDX-License-Identifier: Apache-2.0
"""Where the error is born, as opposed to where it is seen."""
