# SPDX-License-Identifier: Apache-2.0
"""Example scripts in the forms that Megatron-LM has them, pasted in the folder of a checkout."""

import json
from pathlib import Path

import pytest

from tests.integration.jobs import SCRIPT, ttrace

ARRAYS = """\
#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
MASTER_ADDR=${MASTER_ADDR:-"localhost"}
NNODES=${SLURM_NNODES:-"2"}
CHECKPOINT_PATH=$1 #<Specify path>
TOKENIZER_MODEL=$2
DATA_PATH=$3
mkdir -p "$(dirname "logs/gpt")"

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NNODES
    --master_addr $MASTER_ADDR
)
MODEL_ARGS=(
    --num-layers 96
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048
    --max-position-embeddings 2048
    --attention-dropout 0 # none
    --hidden-dropout 0
    --bf16
)
DATA_ARGS=(
    --tokenizer-type Llama2Tokenizer
    --tokenizer-model ${TOKENIZER_MODEL}
    --data-path $DATA_PATH
    "--split '99,1,0'"
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size ${GBS:-256}
    --train-iters 500000
    --lr 1e-4
    --lr-warmup-iters 500
    --eval-iters 10
    --tensor-model-parallel-size ${TP:-8}
    --save $CHECKPOINT_PATH
    --load $CHECKPOINT_PATH
    --tensorboard-dir "${CHECKPOINT_PATH}/tensorboard"
)
if [ -n "${WANDB_API_KEY}" ]; then
    TRAINING_ARGS+=(--wandb-project ${WANDB_PROJECT:-"GPT"})
fi
PRETRAIN_SCRIPT_PATH="pretrain_gpt.py"
if [ ! -f "$PRETRAIN_SCRIPT_PATH" ]; then
    echo "Error: pretrain_gpt.py not found"
    exit 1
fi
ALL=(${MODEL_ARGS[@]} ${DATA_ARGS[@]} ${TRAINING_ARGS[@]})
"""
LAUNCHES = {
    "torchrun": "torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${ALL[@]}\n",
    "quoted": (
        'uv run "${NONE[@]}" python -m torch.distributed.run "${DISTRIBUTED_ARGS[@]}" \\\n'
        '    "$PRETRAIN_SCRIPT_PATH" "${ALL[@]}" |& tee log\nset +x'
    ),
    "srun": (
        "srun -N $NNODES --ntasks-per-node $GPUS_PER_NODE --container-image=x \\\n"
        '    bash -x -c "cd $PWD; python -u pretrain_gpt.py ${ALL[*]}"\n'
    ),
    "sbatch": (
        'CMD="python ${PWD}/pretrain_gpt.py ${ALL[@]}"\n'
        "sbatch <<EOF\n#!/bin/bash\n#SBATCH --exclusive\n"
        'srun -N 2 --ntasks-per-node 8 bash -c "${CMD}" 2>&1 | tee \\${SLURM_JOB_ID}.log\nEOF\n'
    ),
}
PATHS = ("/absent/checkpoints", "/absent/tokenizer.model", "/absent/data_text_document")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with a training script, and with one example for each way to start it."""
    (tmp_path / "pretrain_gpt.py").symlink_to(SCRIPT)
    for name, launch in LAUNCHES.items():
        (tmp_path / f"{name}.sh").write_text(ARRAYS + launch)
        (tmp_path / f"{name}.sh").chmod(0o755)
    # A data set that is there already: shrinking alone does not import Megatron to write one.
    for ending in (".idx", ".bin"):
        (tmp_path / f"text{ending}").touch()
    return tmp_path


def shrunk(checkout: Path, *words: object) -> list[str]:
    """The command that checks the small job with all axes."""
    done = ttrace("shrink", "--json", "--data", "text", "--", *words, cwd=checkout, code=0)
    found = json.loads(done.stdout)
    assert ["ranks", "16", "4", "2 per axis"] in found["changes"]
    return found["jobs"][0]["command"]


def test_all_ways_to_start_it_are_one_job(checkout: Path) -> None:
    """Arrays and the paths that they were given, torchrun, srun, a batch script, a paste."""
    bash = shrunk(checkout, "bash", "torchrun.sh", *PATHS)
    assert bash[:2] == ["env", "CUDA_DEVICE_MAX_CONNECTIONS=1"]
    assert "--wandb-project" not in bash
    assert not any(word.startswith("/absent") for word in bash)
    assert shrunk(checkout, "./quoted.sh", *PATHS) == bash
    assert shrunk(checkout, "bash", "srun.sh", *PATHS) == bash
    place = str(checkout / "pretrain_gpt.py")
    sbatch = shrunk(checkout, "GBS=512", "sbatch", "sbatch.sh", *PATHS)
    assert [word.replace(place, "pretrain_gpt.py") for word in sbatch if word != "GBS=512"] == bash
    assert shrunk(checkout, "TP=4", "MASTER_ADDR=x", "bash", "torchrun.sh")[-1] == bash[-1]
    paste = (
        "CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc_per_node 8 --nnodes 2 \\\n"
        "    --master_addr localhost pretrain_gpt.py \\\n    "
        + " ".join(ARRAYS.partition("MODEL_ARGS=(")[2].partition("# none")[0].split())
        + " --hidden-dropout 0 --bf16 --tokenizer-type Llama2Tokenizer --data-path data "
        "--split '99,1,0' --micro-batch-size 1 --global-batch-size 256 --train-iters 500000 "
        "--lr 1e-4 --lr-warmup-iters 500 --eval-iters 10 --tensor-model-parallel-size 8 "
        "--save checkpoints"
    )
    assert shrunk(checkout, paste) == bash


def test_an_example_is_checked(checkout: Path) -> None:
    """As it is written, with paths that do not exist, on a machine without a GPU."""
    words = ["CUDA_DEVICE_MAX_CONNECTIONS=1", "TP=4", "bash", "torchrun.sh", *PATHS]
    ttrace("check", "--shrink", "--ttrace-no-wandb", "--", *words, cwd=checkout, code=0)
    summary = json.loads((checkout / "ttrace-out" / "summary.json").read_text())
    assert summary["verdict"] == "equivalent"
    assert any("stands for one with 16 ranks" in notice for notice in summary["notices"])
