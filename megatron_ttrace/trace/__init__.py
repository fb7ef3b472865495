# SPDX-License-Identifier: Apache-2.0
"""Keys, records and findings; traces on disk, and the directory that a run owns."""
