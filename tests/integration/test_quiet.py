# SPDX-License-Identifier: Apache-2.0
"""What must be still during a rehearsal."""

import argparse

import pytest
import torch

from megatron_ttrace.mcore import quiet


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


def test_logged_metrics_are_not_added_to():
    """Auxiliary losses and those of multi-token prediction are summed up over a step."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    tracker = MTPLossLoggingHelper.tracker
    before = torch.ones(2)
    tracker["loss_values"] = before
    with quiet.metrics_kept():
        assert "loss_values" not in tracker
        tracker["loss_values"] = torch.zeros(2)
    assert tracker == {"loss_values": before}
    quiet.empty_metrics()
    assert tracker == {}
    tracker.clear()


def test_logged_metrics_of_experts_are_not_added_to():
    """The same for routers."""
    logging = pytest.importorskip("megatron.core.transformer.moe.moe_logging")
    tracker = logging.get_moe_metrics_tracker()
    tracker.record("aux", torch.tensor(2.0), 1, 2)
    with quiet.metrics_kept():
        tracker.record("aux", torch.tensor(3.0), 1, 2)
    assert tracker.metrics["aux"].values.tolist() == [2.0, 0.0]
    tracker.clear()


@pytest.mark.parametrize("graphable", [False, True])
def test_named_random_states_are_put_back(monkeypatch, graphable):
    """As often as needed. They are numbers, or the generators that CUDA graphs draw from."""
    from megatron.core import tensor_parallel

    # As cpu.activate() does.
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", torch.set_rng_state)
    tracker = tensor_parallel.get_cuda_rng_tracker()
    generator = torch.Generator().manual_seed(1)
    before = generator.get_state()
    states = {"model-parallel-rng": generator if graphable else before}
    monkeypatch.setattr(tracker, "states_", states)
    monkeypatch.setattr(tracker, "_is_initialized", True)
    restore = quiet.random_states()
    for _ in range(2):
        with quiet.random_states_kept():
            torch.rand(3, generator=generator)
            if not graphable:
                tracker.states_["model-parallel-rng"] = generator.get_state()
        restore()
        after = tracker.get_states()["model-parallel-rng"]
        assert torch.equal(after.get_state() if graphable else after, before)


def test_random_routing_and_chunks_are_off_and_put_back():
    """All options with which a router draws random numbers; MLPs run in one piece."""
    config = argparse.Namespace(
        moe_router_force_load_balancing=True, moe_router_force_biased=0.5, moe_input_jitter_eps=None
    )
    config.mlp_chunks_for_training = 4
    router, other = torch.nn.Identity(), torch.nn.Identity()
    router.config = config
    wanted = argparse.Namespace(**vars(config))
    assert quiet.has_random_routing(argparse.Namespace(num_experts=4, **vars(config)))
    assert quiet.has_mlp_chunks(config)
    with quiet.without_options([torch.nn.Sequential(router, other)]):
        assert not quiet.has_random_routing(argparse.Namespace(num_experts=4, **vars(config)))
        assert not quiet.has_mlp_chunks(config)
    assert config == wanted


def test_dropout_is_put_back_when_switching_it_off_fails():
    """Some modules are changed already."""

    class Stubborn(torch.nn.Dropout):
        """Its probability cannot be set to zero."""

        def __setattr__(self, name, value):
            if name == "p" and value == 0.0:
                raise RuntimeError("read-only")
            super().__setattr__(name, value)

    model = torch.nn.Sequential(torch.nn.Dropout(0.25), Stubborn(0.5))
    with pytest.raises(RuntimeError, match="read-only"), quiet.without_dropout([model]):
        pass
    assert [module.p for module in model] == [0.25, 0.5]


@pytest.mark.parametrize("kind", ["Dropout", "Dropout1d", "Dropout2d", "AlphaDropout"])
def test_each_kind_of_dropout_is_off(kind):
    """Also that of a fork's convolutions."""
    module = getattr(torch.nn, kind)(0.5)
    values = torch.randn(2, 3, 4)
    with quiet.without_dropout([module], quiet.Off()):
        state = torch.get_rng_state()
        assert torch.equal(module(values), values)
        assert torch.equal(torch.get_rng_state(), state)
    assert module.p == 0.5


@pytest.mark.parametrize(
    ("asked", "own", "expected"), [(0.0, 0.1, True), (0.1, 0.1, False), (0.0, 0.0, False)]
)
def test_dropout_that_no_argument_asks_for(asked, own, expected):
    """A fork's own, or that of adapters: a notice says that it is off."""
    args = argparse.Namespace(hidden_dropout=asked, attention_dropout=0.0)
    assert quiet.has_own_dropout(args, [torch.nn.Sequential(torch.nn.Dropout(own))]) is expected
