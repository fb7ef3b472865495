# SPDX-License-Identifier: Apache-2.0
"""The synthetic checks as fixtures."""

from tests.report.conftest import conflict, diverged, healthy

__all__ = ["conflict", "diverged", "healthy"]
