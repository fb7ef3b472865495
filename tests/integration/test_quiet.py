# SPDX-License-Identifier: Apache-2.0
"""What must be still during a rehearsal."""

import pytest

from megatron_ttrace.integration import quiet


@pytest.fixture
def machine():
    from megatron.core import rerun_state_machine as rerun

    rerun.destroy_rerun_state_machine()
    rerun.initialize_rerun_state_machine(mode=rerun.RerunMode.VALIDATE_RESULTS)
    yield rerun.get_rerun_state_machine()
    rerun.destroy_rerun_state_machine()


def test_results_are_not_refused(machine):
    """A loss that is no number ends a training step, but not the search for its cause."""
    before = dict(vars(machine))

    def never(result):
        raise AssertionError("was asked")

    with quiet.one_attempt():
        machine.validate_result(
            result=float("nan"), rejection_func=never, message="loss", tolerance=0.0, fatal=True
        )
    assert vars(machine) == before
    assert "validate_result" not in vars(machine)
