# SPDX-License-Identifier: Apache-2.0
"""A job as its user asked for it, and its processes on this machine."""
