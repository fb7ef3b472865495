# SPDX-License-Identifier: Apache-2.0
"""Starting ranks and reference runs."""
