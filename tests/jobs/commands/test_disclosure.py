# SPDX-License-Identifier: Apache-2.0
"""A value is shown only if it is known to be harmless."""

import json
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.cli import main
from megatron_ttrace.jobs import provenance
from megatron_ttrace.jobs.commands import disclosure
from megatron_ttrace.jobs.commands.disclosure import command
from megatron_ttrace.mcore.options.decisions import option_of
from megatron_ttrace.mcore.options.roles import ROLES, VALUES
from megatron_ttrace.trace.errors import withhold, without_secrets

CANARY = "canary7f3a"

SECRET_FLAGS = [
    *("--github-token", "--auth", "--db-url", "--hf-token", "--aws-secret-access-key"),
    *("--aws-session-token", "--api-key", "--apikey", "--password", "--pass", "--pwd", "--pin"),
    *("--credentials", "--bearer", "--cookie", "--private-key", "--ssh-key", "--webhook"),
    *("--slack-url", "--dsn", "--connection-string", "--otlp-headers", "--user", "--login"),
    *("--wandb-api-key", "--wandb-key", "--secret", "--client-secret", "--sas", "--signature"),
    *("--wandb-project", "--wandb-exp-name", "--chat-template", "--special-tokens", "-p", "-e"),
]
SECRET_VARIABLES = [
    *("MEGATRON_DB_URL", "NCCL_AUTH", "TTRACE_PASS", "CUDA_TOKEN", "NVTE_X", "TORCH_HOME_PIN"),
    *("UCX_SECRET", "OMP_KEY", "MKL_LICENSE", "PYTORCH_WEBHOOK", "TRITON_USER", "GLOO_ID"),
    *("DNNL_A", "ONEDNN_B", "ATEN_C", "CUBLAS_D", "CUDNN_E", "FLASH_F", "MEGATRON_G", "TORCHX_H"),
]


@pytest.mark.parametrize("flag", SECRET_FLAGS)
def test_values_of_unknown_flags(flag: str) -> None:
    """Whatever form they have, and whatever follows."""
    for words in (
        [flag, CANARY],
        [f"{flag}={CANARY}"],
        [flag, CANARY, CANARY, "train.py", "--lr", "1"],
        [flag, f"postgres://u:{CANARY}@h/db"],
        [flag, f"A={CANARY}"],
        [flag, f"a b {CANARY}"],
        ["--against", f"torchrun train.py {flag} {CANARY}"],
        [f"--ttrace-reference-args={flag} {CANARY}"],
        ["-c", f"export X={CANARY}; torchrun train.py {flag} {CANARY}"],
        [f"torchrun train.py {flag}={CANARY}"],
        ["--mock-data", flag, CANARY],
    ):
        full = ["ttrace", "check", "--", "torchrun", *words]
        assert CANARY not in json.dumps(command(full)), words
        assert flag[:2] in json.dumps(command(full))


@pytest.mark.parametrize(
    "words",
    [
        [f"TOKEN={CANARY}", "torchrun", "train.py"],
        ["env", f"TOKEN={CANARY}", "torchrun", "train.py"],
        ["docker", "run", "-e", f"TOKEN={CANARY}", "image", "torchrun", "train.py"],
        ["sshpass", f"-p{CANARY}", "ssh"],
        ["vault-exec", CANARY, "torchrun", "train.py"],
        ["torchrun", "train.py", "--data-path", f"s3://key:{CANARY}@bucket/a", "0.5"],
        ["torchrun", "train.py", "--load", f"s3://key:se/{CANARY}@bucket/a"],
        ["torchrun", "train.py", "--data-path", f"https://h/a?X-Amz-Signature={CANARY}"],
        ["torchrun", "train.py", f"--save=https://u:{CANARY}@h/a#b"],
        ["torchrun", "train.py", "--lr", "1", f"-----BEGIN {CANARY}"],
        ["torchrun", "--rdzv-conf", f"token={CANARY}", "train.py"],
        [CANARY],
        ["torchrun", "train.py", "--bf16", "123456"],
        ["torchrun", "train.py", "--bf16=1", CANARY],
        ["torchrun", "train.py", "--lr=1", CANARY],
        ["torchrun", "train.py", "--bf16", f"{CANARY}.py"],
        ["torchrun", "train.py", "--hf-tok", f"{CANARY}.py", f"{CANARY}.sh"],
        ["torchrun", "train.py", "--bf16", f"A={CANARY}", f"NCCL_DEBUG={CANARY}"],
        ["torchrun", "train.py", "--bf16", f"python {CANARY}.py"],
        ["torchrun", "train.py", "--", CANARY, "--lr", CANARY],
        ["torchrun", "train.py", "-m", CANARY, "--tee", CANARY],
        ["bash", "-c", f"torchrun train.py --data-path /d; login {CANARY}"],
        ["bash", "-c", f"torchrun train.py --data-path /d\nlogin {CANARY}"],
        ["bash", "-c", f"torchrun train.py --lr 1&&{CANARY}"],
        ["env", "-S", f"TOKEN={CANARY} torchrun train.py {CANARY}"],
        ["env", f"-STOKEN={CANARY} torchrun train.py {CANARY}"],
        ["vault-exec", f"test {CANARY}", "torchrun", "train.py"],
        ["train.py", f"-k{CANARY}"],
        ["train.py", "--TOKEN", CANARY],
        ["train.py", "--data-path", f"s3://a/x,s3://u:{CANARY}@b/x"],
        ["train.py", "--data-path", f"jdbc:postgresql://h/d?password={CANARY}"],
        ["train.py", "--save", f"https://host/x#token={CANARY}"],
        ["train.py", "--x-headers", json.dumps({"Authorization": f"Bearer {CANARY}"})],
        [f"torchrun train.py '--x {CANARY}"],
        [f"cat <<EOF\n{CANARY}\nEOF"],
        ["bash", "-lc", f"export TOKEN={CANARY} && torchrun train.py"],
        ["srun", f"--export=ALL,TOKEN={CANARY}", "python", "train.py"],
        ["mpirun", "-x", f"TOKEN={CANARY}", "python", "train.py"],
        ["curl", "-H", f"Authorization: Bearer {CANARY}", "https://h"],
        ["ttrace", "check", "--against", f"TOKEN={CANARY} torchrun a.py --k {CANARY}"],
        ["ttrace", "check", "--ttrace-reference-args", f"--x-token {CANARY}"],
    ],
)
def test_values_elsewhere(words: list[str]) -> None:
    """Assignments, positional words, addresses."""
    shown = json.dumps(command(words))
    assert CANARY not in shown
    assert "123456" not in shown


@given(st.data())
def test_words_that_no_option_takes(data: st.DataObject) -> None:
    """Behind each option as many words are shown as Megatron's parser takes, and no more."""
    words, expected = ["torchrun", "train.py"], ["torchrun", "train.py"]
    for option in data.draw(st.lists(st.sampled_from(sorted(VALUES)), max_size=4)):
        most = VALUES[option] if disclosure.is_shown(option) else 0
        count = data.draw(st.integers(0, 5))
        flag = f"--{option.replace('_', '-')}"
        known = option_of(flag) == option
        values = ["value"] * count
        words += [flag, *values]
        if known:
            expected += [flag, *values[:most], *["***"] * (count - most)]
        else:
            expected = command(words)
    assert command(words) == expected
    assert command(expected) == expected


def test_overrides_of_fields() -> None:
    """As Megatron-Bridge's recipes take them: known fields; values if their option's are shown."""
    words = "job.py model.num_moe_experts=4 ++train.micro_batch_size=2 logger.comet_tags="
    assert command(f"{words}secret".split()) == f"{words}***".split()
    words = "job.py peft.share_expert_adapters=False logger.comet_api_key=None".split()
    assert command(words) == words
    for word in ("logger.comet_api_key=k", "my.key=k", "eyJhbG.ciOi=", "model.seq_length", "key"):
        assert not command(["job.py", word])[1].endswith(("=k", "=", "key", "length"))
    assert command(["job.py", "--unknown", "model.seq_length=4"]) == ["job.py", "--unknown", "***"]


@pytest.mark.parametrize(
    "text",
    [
        "ttrace check --ttrace-dir out -- torchrun --nproc-per-node 2 pretrain_gpt.py --lr 1e-3",
        "ttrace check --nproc-per-node 4 --ttrace-reference-layout 'tp=2 pp=4' -- train.py --bf16",
        "torchrun --standalone --nproc_per_node=8 -m pretrain_gpt --split 99,1,0 --num-layers 2",
        "python -u train.py --data-path 0.3 /data/a_text 0.7 s3://bucket/b --load /ckpt --seed 1",
        "OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun train.py --moe-layer-freq [0,1]",
        "ttrace diff 'torchrun a.py --lr 1' --directory out",
        "timeout 60 bash train.sh",
        "srun -n4 bash bind.sh python -mtorch.distributed.run train.py --rampup-batch-size 1 2 3",
        "bash -c 'cd /tmp && torchrun train.py --lr 1e-3'",
    ],
)
def test_an_ordinary_command_is_whole(text: str) -> None:
    """It can be pasted."""
    words = shlex.split(text)
    assert command(words) == words
    assert command(command(words)) == words


def test_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are not listed have no value in a report, and a digest in an identity."""
    monkeypatch.setattr(provenance, "_environment", {})
    monkeypatch.setattr(provenance, "_began", "")
    for name in SECRET_VARIABLES:
        monkeypatch.setenv(name, CANARY)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("PYTHONPATH", f"https://u:{CANARY}@h/a")
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    provenance.begin()
    shown = disclosure.environment(dict(provenance._environment))
    assert CANARY not in json.dumps(shown)
    assert shown["NCCL_DEBUG"] == "INFO"
    assert shown["NCCL_AUTH"] == "***"
    first = provenance.numeric_environment()
    assert CANARY not in json.dumps(first)
    assert first["NVTE_FLASH_ATTN"] == "0"
    provenance._environment["NVTE_X"] = "another"
    assert provenance.numeric_environment()["NVTE_X"] != first["NVTE_X"]
    provenance._environment.update({"FORK_FAST": "1", "TORCH_FAST": "1", "RANK": "3"})
    read = provenance.numeric_environment({"FORK_FAST", "TORCH_FAST", "RANK", "FORK_QUICK"})
    assert read.keys() - first.keys() == {"FORK_FAST", "TORCH_FAST"}


def test_arguments_of_an_identity() -> None:
    """Two secrets differ, neither is shown; switches are."""
    first, second = (disclosure.identity(f"{CANARY}{n}", allowed=False) for n in (1, 2))
    assert first != second
    assert CANARY not in first
    assert disclosure.identity(True, allowed=False) is True
    assert disclosure.identity(["s3://u:p@b", 0.5], allowed=True) == ["s3://***@b", 0.5]
    assert not disclosure.is_shown("hf_token")
    assert not disclosure.is_shown(None)
    assert disclosure.is_shown("num_layers")


def test_lists_name_what_exists() -> None:
    """Every option that is called free text is one of Megatron's."""
    assert ROLES.keys() >= disclosure._FREE_TEXT


@pytest.mark.parametrize("word", ["a\nb", "\n", "a;\nb", "out\nx\ty"])
def test_a_line_break_in_a_word(word: str) -> None:
    """It ends a command in a text; it is no text that has a command in it."""
    disclosure.withhold(["ttrace", "check", "--ttrace-dir", word, "--", word])


def test_a_value_within_a_path_that_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log of a failed job must be found; the value is hidden everywhere else."""
    log = tmp_path / CANARY / "rank-0.log"
    log.parent.mkdir()
    log.touch()
    disclosure.withhold(["torchrun", "train.py", "--tag", CANARY])
    text = f"it ended (log: {log}). {CANARY} /{CANARY}/x.log https://u:{CANARY}@h{log}"
    expected = f"it ended (log: {log}). *** /***/x.log https://u:***@h{tmp_path}/***/rank-0.log"
    assert without_secrets(text) == expected
    monkeypatch.chdir(tmp_path)
    text = f"(log: {CANARY}/rank-0.log), {CANARY}, elsewhere/{CANARY}"
    assert without_secrets(text) == f"(log: {CANARY}/rank-0.log), ***, elsewhere/***"
    withhold([str(log)])
    assert without_secrets(f"no key in {log}") == "no key in ***"


def test_every_command_of_ours_is_shown() -> None:
    """With what it was given."""
    for name in (*main.COMMANDS, *main.EVALUATION):
        words = ["ttrace", name]
        assert disclosure.command(words) == words
    words = ["ttrace", "resume", "--steps", "3", "--into", "--nproc-per-node 1 --bf16", "--"]
    assert disclosure.command(words) == words
    hidden = disclosure.command(["ttrace", "resume", "--into", f"--hf-token {CANARY}", "--"])
    assert CANARY not in " ".join(hidden)
