# SPDX-License-Identifier: Apache-2.0
"""What a shell script would start, without starting it."""

import sys

import pytest

from megatron_ttrace.errors import TTraceError
from megatron_ttrace.mcore.command_line import Command, ShellScript
from megatron_ttrace.processes import shell_script

EXAMPLE = """\
#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
SIZE=${SIZE:-2}
CHECKPOINTS=$1
mkdir -p "$(dirname made/here)"
ARGS=(
    --num-layers 4 # all of them
    --tensor-model-parallel-size $SIZE
    --moe-layer-freq "([0]*1+[1]*3)"
)
if [ -n "$SIZE" ]; then ARGS+=(--save $CHECKPOINTS); fi
torchrun --nproc_per_node 8 --nnodes 4 pretrain_gpt.py ${ARGS[@]} |& tee log
"""
BATCH = """\
CMD="cd /m; python /m/pretrain_gpt.py --num-layers 4"
sbatch <<EOF
#!/bin/bash
#SBATCH --nodes=2
srun -l --container-image=x bash -c "${CMD}" 2>&1 | tee log
EOF
"""


def resolve(folder, text, *words):
    """The command of a script."""
    (folder / "train.sh").write_text(text)
    return shell_script.resolve(ShellScript((str(folder / "train.sh"), *words)), folder)


def test_an_environment_with_a_space_in_its_path(tmp_path, monkeypatch):
    """The interpreter is found, though a script cannot name it in its first line."""
    (tmp_path / "new user").mkdir()
    python = tmp_path / "new user" / "python"
    python.symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(python))
    assert resolve(tmp_path, EXAMPLE, "/ckpt").script == "pretrain_gpt.py"


def test_arrays_conditions_and_arguments(tmp_path):
    """As in Megatron-LM's examples: only a shell knows what they become."""
    found = resolve(tmp_path, EXAMPLE, "/ckpt")
    assert found == Command(
        "pretrain_gpt.py",
        (
            *("--num-layers", "4", "--tensor-model-parallel-size", "2"),
            *("--moe-layer-freq", "([0]*1+[1]*3)", "--save", "/ckpt"),
        ),
        {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        32,
        4,
    )


def test_a_batch_script(tmp_path):
    """A script that submits one."""
    assert resolve(tmp_path, BATCH) == Command("/m/pretrain_gpt.py", ("--num-layers", "4"))


@pytest.mark.parametrize("text", ["echo no", "exit 3", "python -c 'print()'", "if", "torchrun x"])
def test_nothing_is_trained(tmp_path, text):
    """One line with the script's last words."""
    with pytest.raises(TTraceError, match=r"train\.sh starts no training script") as raised:
        resolve(tmp_path, text)
    assert "\n" not in str(raised.value)


def test_no_such_script(tmp_path):
    """Is said."""
    with pytest.raises(TTraceError, match=r"absent\.sh: no such script"):
        shell_script.resolve(ShellScript((str(tmp_path / "absent.sh"),)))


def test_the_script_has_the_last_word_on_variables(tmp_path, monkeypatch):
    """What it exports or unsets, whatever was assigned before it; its own variables are its own."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    text = (
        "unset CUDA_DEVICE_MAX_CONNECTIONS\nexport NVTE_A=2 OTHER=3\n"
        "torchrun pretrain_gpt.py --num-layers $LAYERS"
    )
    (tmp_path / "train.sh").write_text(text)
    given = {"LAYERS": "4", "NVTE_A": "1", "NVTE_B": "1"}
    found = shell_script.resolve(ShellScript((str(tmp_path / "train.sh"),), given))
    assert found.arguments == ("--num-layers", "4")
    assert found.environment == {"LAYERS": "4", "NVTE_A": "2", "NVTE_B": "1"}
    assert found.unset == ("CUDA_DEVICE_MAX_CONNECTIONS",)
