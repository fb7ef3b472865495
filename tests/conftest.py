# SPDX-License-Identifier: Apache-2.0
"""Settings of all tests."""

from hypothesis import settings

# A shared machine that is slow for a moment is no failing example.
settings.register_profile("steady", deadline=None, print_blob=True)
settings.load_profile("steady")
