# SPDX-License-Identifier: Apache-2.0
"""Settings of all tests."""

import os

from hypothesis import HealthCheck, settings

# No deadlines: on a shared machine that is slow for a moment an example would fail for no reason.
settings.register_profile("steady", deadline=None, print_blob=True)
# On CI the same examples for the same code, so that a change is judged by what it changes.
settings.register_profile("ci", settings.get_profile("steady"), derandomize=True)
settings.register_profile(
    "nightly",
    settings.get_profile("steady"),
    max_examples=2000,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))
