# SPDX-License-Identifier: Apache-2.0
"""What a reference takes over from its candidate, and when two candidates share one."""

import argparse
import dataclasses
import functools
import json
import sys
import types
from pathlib import Path

import pytest
import torch

from megatron_ttrace.jobs import fingerprint, provenance
from megatron_ttrace.jobs.reference_arguments import apply, explicit, overrides_of, read_overrides
from megatron_ttrace.jobs.settings import Settings
from megatron_ttrace.mcore import contents
from megatron_ttrace.trace.errors import TTraceError


@pytest.fixture(autouse=True)
def script(monkeypatch, tmp_path):
    """A script with nothing beside it: what pytest has imported by now is not part of a job."""
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "train.py")])


def candidate(**others):
    """A validated candidate's arguments, a few of hundreds."""
    values = {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 4,
        "sequence_parallel": True,
        "use_distributed_optimizer": True,
        "recompute_granularity": "full",
        "global_batch_size": 16,
        "micro_batch_size": 2,
        "make_vocab_size_divisible_by": 128,
        "num_layers": 8,
        "lr": 1e-3,
        "bf16": True,
        "save": "checkpoints",
        "wandb_project": "mine",
        "world_size": 8,
        "rank": 3,
        "ttrace_dir": "out",
        "data_path": None,
    }
    return argparse.Namespace(**{**values, **others})


SETTINGS = Settings(directory=Path("out"), seeds=2)


def test_the_layout_goes_the_model_stays(tmp_path):
    """One device, nothing written; the numbers' arguments are the candidate's."""
    order = tmp_path / "order.json"
    order.write_text(json.dumps({"overrides": overrides_of(candidate())}))
    args = candidate(global_batch_size=None)
    apply(args, dataclasses.replace(SETTINGS, overrides=order))
    assert args.tensor_model_parallel_size == args.pipeline_model_parallel_size == 1
    assert not args.sequence_parallel
    assert not args.use_distributed_optimizer
    assert args.recompute_granularity is None
    assert args.save is None
    assert args.wandb_project == ""
    assert (args.num_layers, args.lr, args.bf16, args.micro_batch_size) == (8, 1e-3, True, 2)
    assert args.global_batch_size == 16
    assert args.make_vocab_size_divisible_by == 256
    assert not hasattr(args, "use_torch_fsdp2")


def test_arguments_in_a_checkpoint(monkeypatch):
    """A reference takes them as its candidate does, and loads nothing."""

    def load_args_from_checkpoint(args, load_arg):
        if getattr(args, load_arg):
            args.num_layers, args.tensor_model_parallel_size = 3, 4

    module = types.SimpleNamespace(load_args_from_checkpoint=load_args_from_checkpoint)
    monkeypatch.setitem(sys.modules, "megatron.training.checkpointing", module)
    args = candidate(use_checkpoint_args=True, load="there", pretrained_checkpoint=None)
    apply(args, SETTINGS)
    assert (args.num_layers, args.tensor_model_parallel_size) == (3, 1)
    assert not args.use_checkpoint_args
    assert not args.load


@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize("fsdp2", [True, False])
def test_gradients_are_reduced_in_the_same_precision(fsdp2, bf16):
    """torch's FSDP2 reduces those of bf16 weights in bf16."""
    args = candidate(use_torch_fsdp2=fsdp2, bf16=bf16, grad_reduce_in_bf16=False)
    apply(args, SETTINGS)
    assert args.grad_reduce_in_bf16 is (fsdp2 and bf16)
    assert not args.use_torch_fsdp2


def test_pipeline_stages_leave_the_pattern_of_layers(tmp_path):
    """A hybrid model's pattern says where stages end; what stands behind a slash is kept."""
    args = candidate(hybrid_layer_pattern="M-|M*/MM")
    apply(args, SETTINGS)
    assert args.hybrid_layer_pattern == "M-M*/MM"
    chosen = candidate(hybrid_layer_pattern="M-|M*")
    apply(chosen, dataclasses.replace(SETTINGS, reference_args="--hybrid-layer-pattern M-|M*"))
    assert chosen.hybrid_layer_pattern == "M-|M*"


def test_reference_args_win():
    """A trusted smaller layout, given by the user."""
    args = candidate(tensor_model_parallel_size=2)
    text = "--tensor-model-parallel-size 2 --attention-backend=unfused"
    apply(args, dataclasses.replace(SETTINGS, reference_args=text))
    assert args.tensor_model_parallel_size == 2
    assert args.pipeline_model_parallel_size == 1
    assert explicit(text) == {"tensor_model_parallel_size", "attention_backend"}
    assert explicit("") == set()


@pytest.mark.parametrize("text", ["{", "{}", ""])
def test_an_unreadable_order(tmp_path, text):
    """One line with the file in it."""
    path = tmp_path / "order.json"
    path.write_text(text)
    with pytest.raises(TTraceError, match=r"order.json cannot be read"):
        read_overrides(path)
    with pytest.raises(TTraceError, match="cannot be read"):
        read_overrides(tmp_path / "none.json")


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    """The device is asked for elsewhere."""
    monkeypatch.setattr(fingerprint, "_device", lambda: "cpu")
    monkeypatch.setattr(fingerprint, "_tree", lambda folder, _: "")


def digest(settings=SETTINGS, **others):
    """The fingerprint of a candidate."""
    return fingerprint.digest(fingerprint.identity(candidate(**others), settings))


@pytest.mark.parametrize(
    "changed",
    [
        {"pipeline_model_parallel_size": 1},
        {"sequence_parallel": False, "use_distributed_optimizer": False},
        {"recompute_granularity": None},
        {"rank": 5, "world_size": 64},
        {"save": None, "wandb_project": ""},
        {"ttrace_dir": "elsewhere"},
        # padding to 256 rows in both
        {"tensor_model_parallel_size": 1, "make_vocab_size_divisible_by": 256},
    ],
)
def test_layouts_share_a_reference(changed):
    """What a single device does not do does not count."""
    assert digest(**changed) == digest()


@pytest.mark.parametrize(
    "changed",
    [
        {"lr": 2e-3},
        {"num_layers": 9},
        {"bf16": False},
        {"global_batch_size": 32},
        {"micro_batch_size": 1},
        {"tensor_model_parallel_size": 4},
        {"something_new": 1},
        {"log_probability_scale": 2.0},
        {"saved_activations_dtype": "fp8"},
    ],
)
def test_what_changes_numbers_needs_another_reference(changed):
    """The padded vocabulary included, and what is not known to be harmless."""
    assert digest(**changed) != digest()


@pytest.mark.parametrize(
    "change",
    [{"iterations": (1, 2)}, {"seeds": 3}, {"init": "megatron"}, {"reference_args": "--x"}],
)
def test_our_own_settings_count(change):
    """What is traced, from which start."""
    assert digest(dataclasses.replace(SETTINGS, **change)) != digest()


@pytest.mark.parametrize(
    ("option", "place"),
    [
        ("data_path", "corpus"),
        ("vocab_file", "corpus.bin"),
        ("tokenizer_model", "corpus.bin"),
        ("tokenizer_model", ""),  # a folder with files
        ("te_precision_config_file", "corpus.bin"),
        ("an_option_of_a_fork", "corpus.bin"),
    ],
)
def test_changed_files_are_other_data(tmp_path, option, place):
    """Size and time of the files tell."""
    file, path = tmp_path / "data" / "corpus.bin", str(tmp_path / "data" / place)
    file.parent.mkdir()
    digests = set()
    for content in (b"12", b"123"):
        file.write_bytes(content)
        digests.add(digest(**{option: [path] if option == "data_path" else path}))
    assert len(digests) == 2


@pytest.mark.parametrize("option", ["data_args_path", "per_split_data_args_path"])
def test_a_changed_list_of_data_is_other_data(tmp_path, option):
    """The list, and what it names."""
    prefix, blend = tmp_path / "corpus", tmp_path / "blend"
    is_list = option == "data_args_path"
    text = f"1 {prefix}" if is_list else json.dumps({"train": ["1", str(prefix)], "test": None})
    digests = set()
    for content, listed in ((b"12", text), (b"123", text), (b"123", f"{text} ")):
        prefix.with_suffix(".bin").write_bytes(content)
        blend.write_text(listed)
        digests.add(digest(**{option: str(blend)}))
    assert len(digests) == 3


def test_differences_in_words():
    """The message says how a reference of another run differs."""
    ours = fingerprint.identity(candidate(), SETTINGS)
    theirs = fingerprint.identity(candidate(lr=0.5), dataclasses.replace(SETTINGS, seeds=9))
    assert fingerprint.differences(ours, ours) == []
    assert fingerprint.differences(ours, theirs) == [
        "lr is 0.001 here and 0.5 there",
        "seeds is 2 here and 9 there",
    ]


@pytest.mark.parametrize(
    ("settings", "arguments", "expected"),
    [
        ({}, {"params_dtype": torch.bfloat16}, False),
        ({"isolate": True}, {"params_dtype": torch.bfloat16}, True),
        ({"isolate": True}, {"params_dtype": torch.float32}, False),
        ({"isolate": True}, {"params_dtype": torch.bfloat16, "fp8": "hybrid"}, False),
        ({"isolate": True, "reference": Path("made")}, {"params_dtype": torch.bfloat16}, None),
    ],
)
def test_replays_of_modules(settings, arguments, expected):
    """A reference whose replays are isolated judges isolated runs only; those have any."""
    wanted = dataclasses.replace(SETTINGS, **settings)
    ours = fingerprint.identity(candidate(**arguments), wanted)
    assert ours["ttrace"]["isolate"] is expected
    for theirs in (False, True):
        other = {**ours, "ttrace": {**ours["ttrace"], "isolate": theirs}}
        fits = expected is None or expected is theirs
        assert (fingerprint.differences(ours, other) == []) is fits


def test_another_megatron():
    """A reference that another Megatron made is told from one that only lies elsewhere."""
    ours = fingerprint.identity(candidate(), SETTINGS)
    moved = {**ours, "told": {"megatron": "/there"}}
    assert fingerprint.other_megatron(ours, moved) == ""
    changed = {**moved, "code": {**ours["code"], "megatron.core": "0" * 16}}
    message = fingerprint.other_megatron(ours, changed)
    assert "/there" in message
    assert ours["told"]["megatron"] in message
    assert "--ttrace-allow-other-megatron" in message


def test_compiled_modules(tmp_path, monkeypatch):
    """They count as source does, beside the script and in Megatron (``helpers_cpp``)."""
    file = tmp_path / "kernels.cpython-312-x86_64-linux-gnu.so"
    module = types.ModuleType("kernels")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "kernels", module)
    found = []
    for content in (b"\x7fELF1", b"\x7fELF2"):
        file.write_bytes(content)
        assert fingerprint._beside(tmp_path / "train.py")["kernels"] == file
        files = contents.python_files(tmp_path, contents.CODE)
        found.append(fingerprint._content(files, set()))
    assert found[0] != found[1]


def test_modules_beside_the_script(tmp_path, monkeypatch):
    """By where their folders really lie; a file beside the script counts, whatever it links to."""
    folder, elsewhere = tmp_path / "job", tmp_path / "elsewhere"
    for name in ("job", "elsewhere"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "own.py").touch()
    (tmp_path / "again").symlink_to("job")
    (folder / "far.py").symlink_to(elsewhere / "own.py")
    paths = [tmp_path / "again" / "own.py", folder / "far.py", elsewhere / "own.py"]
    for number, path in enumerate(paths):
        module = types.ModuleType("made_up")
        module.__file__ = str(path)
        monkeypatch.setitem(sys.modules, f"made_up_{number}", module)
    files = fingerprint._beside(folder / "train.py")
    made_up = {name: file for name, file in files.items() if name.startswith("made_up")}
    assert made_up == {"made_up_0": folder / "own.py", "made_up_1": folder / "far.py"}


def test_modules_that_functions_import(tmp_path, monkeypatch):
    """A reference run ends with them; its candidate finds them by name, here or where they were."""
    home, there = tmp_path / "job", tmp_path / "there"
    for folder in (home, there):
        folder.mkdir()
        (folder / "late.py").write_text("import os\nSCALE = os.environ.get('LATE_SCALE')\n")
    monkeypatch.setattr(fingerprint.argv, "script", lambda: str(there / "train.py"))
    module = types.ModuleType("late")
    module.__file__ = str(there / "late.py")
    with monkeypatch.context() as imported:
        imported.setitem(sys.modules, "late", module)
        modules = {"late": fingerprint.imported()["late"]}
    assert not fingerprint.changed({})
    assert not fingerprint.changed(modules)
    monkeypatch.setattr(fingerprint.argv, "script", lambda: str(home / "train.py"))
    assert not fingerprint.changed(modules)
    with monkeypatch.context() as other:
        other.setitem(provenance._environment, "LATE_SCALE", "2")
        assert fingerprint.changed(modules) == "late"
    (home / "late.py").write_text("SCALE = 2\n")
    assert fingerprint.changed(modules) == "late"
    (home / "late.py").unlink()
    assert not fingerprint.changed(modules)


def test_words_that_megatrons_parser_does_not_see(tmp_path, monkeypatch):
    """They count, with the files that they name."""
    config = tmp_path / "run.yaml"
    known = {digest()}
    for words in (["--scale", "2"], ["--scale", "3"], [f"--config={config}"], [str(config)]):
        for text in ("a", "b"):
            config.write_text(text)
            monkeypatch.setattr(fingerprint.argv, "kept", lambda words=words: words)
            known.add(digest())
    assert len(known) == 1 + 2 + 2 * 2


def test_variables_by_names_that_are_put_together(tmp_path, monkeypatch):
    """As by a function that is given the name, or a part of it."""
    script = tmp_path / "train.py"
    script.write_text('size = number("MY_SIZE") + int(environ["LOSS_" + name])\n')
    known = set()
    for name, value in [("OTHER", "1"), ("MY_SIZE", "1"), ("MY_SIZE", "2"), ("LOSS_WEIGHT", "2")]:
        with monkeypatch.context() as other:
            other.setitem(provenance._environment, name, value)
            known.add(digest())
    assert len(known) == 4


@pytest.mark.parametrize(
    ("home", "counts"),
    [("fork", True), ("env/site-packages", False), ("cache", False)],
)
def test_modules_on_the_path(tmp_path, monkeypatch, home, counts):
    """What a script imports through PYTHONPATH is its code, but not what is installed or made."""
    file = tmp_path / home / "layers.py"
    file.parent.mkdir(parents=True)
    file.touch()
    module = types.ModuleType("layers")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "layers", module)
    path = [str(tmp_path / name) for name in ("fork", "env/site-packages")]
    monkeypatch.setattr(sys, "path", [*path, *sys.path])
    script = tmp_path / "job" / "train.py"
    before = fingerprint.code(script)
    file.write_text("import os\nfast = os.environ.get('FORK_FAST') or os.getenv(\"FORK_QUICK\")")
    variables: set[str] = set()
    assert (fingerprint.code(script, variables) != before) == counts
    assert variables.issuperset({"FORK_FAST", "FORK_QUICK"}) == counts


def test_an_identity_tells_functions_apart() -> None:
    """By their names: addresses differ in each process."""
    silu, gelu = torch.nn.functional.silu, torch.nn.functional.gelu
    plain = fingerprint._plain
    assert plain(silu) == plain(silu) != plain(gelu)
    assert plain([functools.partial(silu)]) != plain([functools.partial(torch.relu)])
    assert plain(object()) == plain(object())
