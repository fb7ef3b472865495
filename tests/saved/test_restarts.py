# SPDX-License-Identifier: Apache-2.0
"""What ``ttrace resume`` prints while its runs follow each other."""

from megatron_ttrace.saved import restarts


def test_what_all_runs_print() -> None:
    """It is printed once."""
    printed: list[str] = []
    say = restarts._once(printed.append)
    for line in ("on the CPU", "training (uninterrupted)", "on the CPU", "training (restarted)"):
        say(line)
    assert printed == ["on the CPU", "training (uninterrupted)", "training (restarted)"]
