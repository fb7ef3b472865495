# SPDX-License-Identifier: Apache-2.0
"""Every option of every supported release has a decision."""

import argparse
import re
from pathlib import Path

import pytest

from megatron_ttrace.jobs import reference_arguments
from megatron_ttrace.mcore import versions
from megatron_ttrace.mcore.options import decisions
from megatron_ttrace.mcore.options.decisions import option_of
from megatron_ttrace.mcore.options.roles import MANY, RESETS, ROLES, VALUES, Role

RELEASES = versions.KNOWN


def registered(release):
    """Flags and their options, as the release's parser was found to have them."""
    options = {}
    for line in Path(__file__).with_name("registered.txt").read_text().splitlines()[1:]:
        flag, option, *releases = line.split()
        if not releases or release in releases:
            options[flag] = flag[2:].replace("-", "_") if option == "=" else option
    return options


@pytest.fixture(scope="module")
def installed():
    """The parser of the installed release."""
    from megatron.training import arguments

    return arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


@pytest.mark.parametrize("release", RELEASES)
def test_every_release_is_covered(release):
    """No flag without a decision, none that sets something else than the table says."""
    flags = registered(release)
    assert len(flags) > 700
    for flag, option in flags.items():
        assert option in ROLES, f"{flag} of {release} has no role"
        assert option_of(flag) == option, flag


def test_the_installed_release_is_covered(installed):
    """A new release shows its new options here."""
    for action in installed._actions:
        for flag in action.option_strings:
            if flag.startswith("--") and flag != "--help":
                assert action.dest in ROLES, f"{flag} has no role"
                assert option_of(flag) in ROLES, flag
                values = {None: 1, "+": MANY, "*": MANY}.get(action.nargs, action.nargs)
                assert VALUES[action.dest] == values, f"{flag} has {action.nargs} values"


def test_nothing_is_decided_that_no_release_has():
    """A name with a typing error would decide nothing."""
    registered_options = {option for release in RELEASES for option in registered(release).values()}
    assert set(ROLES) == registered_options
    decided = {*decisions.SINGLE_DEVICE, *decisions.QUIET} - set(decisions.DERIVED)
    assert decided <= registered_options
    assert set(decisions.ALIASES.values()) <= registered_options


def test_layout_is_reset_and_the_model_is_kept():
    """As a whole: a single device has no layout."""
    resets, refused = set(RESETS), set(decisions.REFUSED)
    layout, model = (
        {option for option, role in ROLES.items() if role in roles}
        for roles in ((Role.AXIS, Role.LAYOUT), (Role.CODE, Role.DATA, Role.SIZE))
    )
    assert layout <= resets - refused
    assert model.isdisjoint(resets | refused)
    assert refused <= set(ROLES)


def test_reset_values_are_what_megatron_would_parse(installed):
    """A boolean stays one, and a list a list."""
    for action in installed._actions:
        value = RESETS.get(action.dest)
        if value is None:
            continue
        if action.nargs in ("+", "*"):
            assert isinstance(value, list), action.dest
        elif isinstance(action.default, bool):
            assert isinstance(value, bool), action.dest
        if action.choices:
            values = value if isinstance(value, list) else [value]
            assert set(values) <= set(action.choices), action.dest


NEEDING = {
    **dict.fromkeys(
        ("app_tag_run_name", "one_logger_project", "one_logger_run_name"), "enable_one_logger"
    ),
    "ckpt_convert_save": "ckpt_convert_format",
    "memory_snapshot_path": "record_memory_history",
    "non_persistent_global_ckpt_dir": "non_persistent_ckpt_type",
    "non_persistent_local_ckpt_dir": "non_persistent_ckpt_type",
    "otel_service_name": "otel_enabled",
    "wandb_save_dir": "wandb_project",
}
WHERE = re.compile(r"(dir|path|file|filename|project|_map|_name|convert_save)$")


def test_options_that_name_where_a_job_writes():
    """A run of ours must not write there: they, or what they need, are switched off."""
    writing = {
        option
        for option, role in ROLES.items()
        if role in (Role.OPERATION, Role.CHECKPOINT) and WHERE.search(option)
    }
    assert set(NEEDING) <= writing
    assert {NEEDING.get(option, option) for option in writing} <= set(decisions.SILENT)


@pytest.mark.parametrize("reports", [False, True])
def test_silence(reports):
    """What would write or stop early is off; a check keeps where it logs and what it loads."""
    values = {
        "tensorboard_dir": "a",
        "log_progress": True,
        "exit_interval": 1,
        "non_persistent_ckpt_type": "local",
        "load": "b",
        "rerun_mode": "validate_results",
    }
    args = argparse.Namespace(**values)
    decisions.silence(args, reports=reports)
    loading = {name: values[name] for name in ("load", "rerun_mode")}
    kept = {
        name: values[name] if reports else None
        for name in ("tensorboard_dir", "non_persistent_ckpt_type")
    }
    assert vars(args) == {**loading, **kept, "log_progress": False, "exit_interval": None}


def derived(**arguments):
    """A reference's arguments."""
    args = argparse.Namespace(**arguments)
    values = decisions.derive(args)
    return {name: values.get(name, value) for name, value in arguments.items()}


@pytest.mark.parametrize("needing", ["fp8_param_gather", "use_precision_aware_optimizer"])
def test_the_distributed_optimizer_stays_for_what_needs_it(needing):
    """It is arithmetic then, not only layout."""
    assert derived(use_distributed_optimizer=True, **{needing: True}) == {
        "use_distributed_optimizer": True,
        needing: True,
    }
    assert not derived(use_distributed_optimizer=True, **{needing: False})[
        "use_distributed_optimizer"
    ]


def test_overlap_goes_with_what_depends_on_it():
    """Megatron refuses a delayed weight gradient without the overlap that it belongs to."""
    overlap = {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True}
    assert derived(**overlap, moe_token_dispatcher_type="flex") == {
        "overlap_moe_expert_parallel_comm": False,
        "delay_wgrad_compute": False,
        "moe_token_dispatcher_type": "alltoall",
    }
    assert derived(moe_token_dispatcher_type="allgather") == {
        "moe_token_dispatcher_type": "allgather"
    }


def test_values_are_not_shared():
    """Megatron appends to some lists of its arguments."""
    first = decisions.derive(argparse.Namespace())
    first["high_priority_stream_groups"].append("dp")
    assert decisions.derive(argparse.Namespace())["high_priority_stream_groups"] == []


@pytest.mark.parametrize(
    ("values", "derived"), [("torch", "torch"), ("fsdp_dtensor", "torch_dist")]
)
def test_a_format_that_a_script_may_insist_on(values, derived):
    """A reference writes no checkpoint; pretrain_vlm.py takes one format, Megatron-FSDP another."""
    assert decisions.derive(argparse.Namespace(ckpt_format=values))["ckpt_format"] == derived


def test_refusals_name_the_option():
    """Only where it is used."""
    args = argparse.Namespace(perform_rl_step=True, skip_train=False, yaml_cfg=None)
    (line,) = decisions.refusals(args)
    assert line.startswith("perform_rl_step = True: ")


def test_reference_args_win_under_any_name():
    """A flag that switches something off names another option than it sounds like."""
    options = reference_arguments.explicit("--no-overlap-p2p-communication --fp8-format=hybrid")
    assert {"overlap_p2p_comm", "fp8"} <= options
