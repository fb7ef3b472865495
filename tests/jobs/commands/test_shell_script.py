# SPDX-License-Identifier: Apache-2.0
"""What a shell script would start, without starting it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_ttrace.jobs.commands import guard, shell_script
from megatron_ttrace.jobs.commands.command_line import Command, ShellScript, parse
from megatron_ttrace.trace.errors import TTraceError
from tests import programs

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
    command = resolve(tmp_path, EXAMPLE, "/ckpt")
    assert command == Command(
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
    assert resolve(tmp_path, BATCH) == Command("/m/pretrain_gpt.py", ("--num-layers", "4"))


@pytest.mark.parametrize(
    ("launcher", "text", "ranks"),
    [
        ("srun -n 4", "python pretrain_gpt.py --bf16", 4),
        ("mpirun -np 4", "exec python pretrain_gpt.py --bf16", 4),
        ("srun -N 2", "torchrun --nnodes 2 --nproc-per-node 4 pretrain_gpt.py --bf16", 8),
        ("nohup", "echo 'python pretrain_gpt.py --bf16' > b.sh; srun -n 4 bash inner.sh", 4),
    ],
)
def test_ranks_of_the_launcher_around(tmp_path, launcher, text, ranks):
    """They count where the script starts the training."""
    (tmp_path / "train.sh").write_text(text)
    (tmp_path / "inner.sh").write_text("python pretrain_gpt.py --bf16")
    script = parse([*launcher.split(), "bash", str(tmp_path / "train.sh")])
    command = shell_script.resolve(script, tmp_path)
    assert (command.script, command.arguments, command.ranks) == (
        "pretrain_gpt.py",
        ("--bf16",),
        ranks,
    )
    assert "TTRACE_TASKS" not in command.environment


@pytest.mark.parametrize(
    ("text", "why"),
    [
        *(("echo no", ": no"), ("exit 3", ""), ("python -c 'print()'", ": all .* is python")),
        *(
            ("if", ": .*syntax"),
            ("export A=<a path>", ": .*syntax"),
            ("torchrun x", ": all that it starts is torchrun"),
        ),
    ],
)
def test_nothing_is_trained(tmp_path, text, why):
    """One line with the script's last words, or with what it starts."""
    with pytest.raises(
        TTraceError, match=rf"train\.sh does not start a Megatron training script{why}"
    ) as raised:
        resolve(tmp_path, text)
    assert "\n" not in str(raised.value)


def test_no_such_script(tmp_path):
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
    assigned = {"LAYERS": "4", "NVTE_A": "1", "NVTE_B": "1"}
    command = shell_script.resolve(ShellScript((str(tmp_path / "train.sh"),), assigned))
    assert command.arguments == ("--num-layers", "4")
    assert command.environment == {"LAYERS": "4", "NVTE_A": "2", "NVTE_B": "1"}
    assert command.unset == ("CUDA_DEVICE_MAX_CONNECTIONS",)


JOB = "pretrain_gpt.py --num-layers 4"
RUN = f"torchrun --nproc-per-node 2 {JOB}"
STARTS = {
    "an absolute path": f"BIN/{RUN}",
    "a relative path": f"../bin/{RUN}",
    "a variable": f"LAUNCHER=BIN/torchrun\n$LAUNCHER --nproc-per-node 2 {JOB}",
    "a PATH of its own": f"export PATH=BIN:$PATH\n{RUN}",
    "no other PATH": f"PATH=BIN\n{RUN}",
    "a virtual environment": f"source BIN/activate\n{RUN}",
    "conda": f'eval "$(BIN/conda shell.bash hook)"\nconda activate x\n{RUN}',
    "modules": f'module() {{ eval "$(BIN/modulecmd bash "$@")"; }}\nmodule load cuda\n{RUN}',
    "nothing on PATH": RUN,
    "exec": f"exec BIN/{RUN}",
    "exec with a name": f"exec -a x BIN/{RUN}",
    "time": f"time BIN/{RUN}",
    "env": f"env A=1 BIN/{RUN}",
    "an empty environment": f"env -i PATH=BIN {RUN}",
    "a function": f'run() {{ BIN/torchrun "$@"; }}\nrun --nproc-per-node 2 {JOB}',
    "a function that is called as a reader": f"cat() {{ BIN/{RUN}; }}\ncat x",
    "a here-document": f"bash <<EOF\nBIN/{RUN}\nEOF",
    "a script that it writes": f"cat > made.sh <<EOF\nBIN/{RUN}\nEOF\nbash made.sh",
    "a background job": f"BIN/{RUN} &\nwait",
    "a background job without end": f"while true; do :; done &\nsleep 1\nBIN/{RUN}",
    "a subshell": f"( cd ..; bin/{RUN} )",
    "a substitution": f"echo $(BIN/{RUN})",
    "a process substitution": f"cat < <(BIN/{RUN})",
    "a coprocess": f"coproc BIN/{RUN}\nwait",
    "a pipeline": f"BIN/{RUN} 2>&1 | tee -a log",
    "a log of its own": f"exec > >(tee log) 2>&1\nBIN/{RUN}",
    "xargs": "echo --num-layers 4 | xargs BIN/torchrun --nproc-per-node 2 pretrain_gpt.py",
    "find": f"find . -name train.sh -exec BIN/{RUN} ';'",
    "awk": f"awk 'BEGIN {{ system(\"BIN/{RUN}\") }}'",
    "a program of its own": f"chmod +x pretrain_gpt.py other.sh\nrm -f started.sh\nBIN/{RUN}",
    "nohup": f"nohup BIN/{RUN} > log 2>&1 &",
    "sudo": f"sudo -E BIN/{RUN}",
    "srun": f"srun -N 1 -n 2 BIN/python3.12 -u {JOB}",
    "srun by path": f"BIN/srun -n 2 BIN/python {JOB}",
    "sbatch": f"sbatch <<EOF\n#!/bin/bash\nBIN/{RUN}\nEOF",
    "docker": f"docker run --rm -it image BIN/{RUN}",
    "mpiexec": f"BIN/mpiexec -n 2 BIN/python3.12 {JOB}",
    "accelerate": f"BIN/accelerate launch --num_processes 2 {JOB}",
    "a module of Python": f"BIN/python3.12 -m torch.distributed.run --nproc-per-node 2 {JOB}",
    "bash -c": f"bash -c 'BIN/{RUN}'",
    "sh -c": f"/bin/sh -c 'BIN/{RUN}'",
    "eval": f'eval "BIN/{RUN}"',
    "another script": f"printf '' > log\nsource ./other.sh\nrun BIN/torchrun {JOB}",
    "a script by path": "./started.sh --num-layers 4",
    "a script by sh": "sh started.sh --num-layers 4",
    "a wrapped script": "nohup bash started.sh --num-layers 4 &",
    "an exit trap": f"trap 'BIN/{RUN}' EXIT",
    "other traps": f"set +T; trap - DEBUG; shopt -u extdebug\nBIN/{RUN}",
    "the first of Slurm's nodes": "A=$(scontrol show hostnames x | head -n 1)\n"
    "B=$(srun -N 1 BIN/hostname -i)\n"
    f"BIN/torchrun --master_addr $A --rdzv-endpoint $B:1 --nproc-per-node 2 {JOB}",
    "restricted": f"PATH=BIN\nset -r\n{RUN}",
    "a failing step": f"set -e\nmkdir -p new/dir\ncd . && BIN/{RUN}",
}
"""Ways to start a training of two ranks. ``BIN`` has programs that would leave a mark."""
EFFECTS = {
    "folders": "mkdir -p a/b; /bin/mkdir c; install -d d",
    "removal": "find . -delete; rm -rf keep; /bin/rm -f train.sh; unlink keep/old; rmdir keep",
    "redirections": "> keep/old; : > new; echo x >> keep/old; exec 3> keep/old; echo x >&3; > '  '",
    "an array's redirection": "{ echo x; } > keep/old; (echo y) >| keep/old; printf z &> keep/old",
    "programs": "touch keep/old; cp keep/old new; mv keep/old b; ln -s keep c; chmod 0 keep/old",
    "readers that write": "sed -i s/a/b/ keep/old; sort -o keep/old keep/old; find -fprint new",
    "downloads": "wget -O keep/old http://localhost/; curl -o new http://localhost/; git init repo",
    "the network": "echo x > /dev/tcp/127.0.0.1/9; exec 5<>/dev/udp/127.0.0.1/9",
    "a descriptor": "exec 4< keep/old; echo x > /dev/fd/4; echo x > /proc/self/fd/4",
    "other processes": "kill -9 VICTIM; /bin/kill -9 VICTIM; pkill -9 -P VICTIM; kill -9 -VICTIM",
    "Python": "python -c 'open(\"new\", \"w\")'; python3 - <<EOF\nopen('new', 'w')\nEOF",
    "Perl": "perl -e 'unlink \"keep/old\"'",
}
"""What a script does before its training, and must not have done."""
STRANGE = {
    "loader": "/lib64/ld-linux-x86-64.so.2 BIN/torchrun --nproc-per-node 2 " + JOB,
    "env-split": f"env -S 'BIN/{RUN}'",
    "git-alias": f"git -c alias.x='!BIN/{RUN}' x\n{RUN}",
    "awk-pipe": f"awk 'BEGIN {{ print 1 | \"BIN/{RUN}\" }}'\n{RUN}",
    "sort-compress": f"seq 9 | sort -S 1b --compress-program=BIN/torchrun\n{RUN}",
    "tar-action": f"tar cf x.tar --checkpoint-action=exec=BIN/torchrun --checkpoint=1 .\n{RUN}",
    "reader-by-link": f"ln -s BIN/torchrun ./cat\n./cat x\n{RUN}",
    "reader-on-path": f"PATH=BIN:$PATH\nls\n{RUN}",
    "hashed": f"hash -p BIN/torchrun cat\ncat x\n{RUN}",
    "environment-file": f"BASH_ENV=BIN/activate bash -c 'BIN/{RUN}'",
    "prompt-command": f"export PROMPT_COMMAND='BIN/{RUN}'\nbash -i <<< true\n{RUN}",
    "debug-trap": f"trap 'BIN/torchrun' DEBUG\n{RUN}",
    "preloaded": f"LD_PRELOAD=BIN/lib.so cat x\n{RUN}",
    "loaded-builtin": f"enable -f BIN/lib.so torchrun\n{RUN}",
    "remote": f"ssh localhost BIN/torchrun; at now <<< BIN/torchrun; crontab BIN/torchrun\n{RUN}",
    "source-of-a-string": f"source /dev/stdin <<< 'BIN/{RUN}'",
    "arithmetic-index": f"X='a[$(BIN/torchrun)]'\n(( X )) || true\n{RUN}",
    "lock": f"flock keep/old BIN/{RUN}",
    "typescript": f"script -qc 'BIN/{RUN}' /dev/null\n{RUN}",
    "shared-memory": f"echo x > /dev/shm/ttrace-canary; echo 1 > /proc/self/oom_score_adj\n{RUN}",
    "read-and-write": f"exec 3<>keep/old; echo x >&3; exec 3>&-\n{RUN}",
    "in-place": f"dd if=/dev/zero of=keep/old; truncate -s 0 keep/old; mkfifo keep/f\n{RUN}",
    "times": f"touch -d 2000-01-01 keep/old; chmod -R 0 .; chown nobody keep/old\n{RUN}",
    "parent": f"kill -9 $PPID; kill -STOP $PPID; kill -9 -1\n{RUN}",
    "git-writes": f"git init .; git config --global x.y z; git stash\n{RUN}",
    "endless-output": f"yes\n{RUN}",
    "endless-loop": f"while :; do :; done\n{RUN}",
    "fork-bomb": f"f() {{ f | f & }}; ulimit -u 40; f; sleep 1\n{RUN}",
    "zeros": f"head -c 99999999999 /dev/zero | tail -c 1; X=$(cat /dev/zero | head -c 9)\n{RUN}",
    "a-fifo": f"cat < fifo\n{RUN}",
    "large-word": f"X=$(printf '%0100000000d' 1)\n{RUN}",
    "background": f"(while :; do sleep 1; done) & disown\n{RUN}",
}
"""Ways to run a canary in ``BIN``, to change a file, or never to end, around a training."""
PROGRAMS = [
    *"torchrun cat ls python python3.12 accelerate mpiexec".split(),
    *"srun conda modulecmd sudo sbatch docker".split(),
]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Programs that leave a mark, files that must stay as they are, scripts that are started."""
    monkeypatch.setattr(shell_script, "_SECONDS", 300)  # for a machine that is busy
    text = f"#!{sys.executable}\nopen({str(tmp_path / 'ran')!r}, 'w')\n"
    for name in PROGRAMS:
        programs.executable(tmp_path / "bin" / name, text)
    (tmp_path / "bin" / "activate").write_text(f"export PATH={tmp_path}/bin:$PATH\n")
    work = tmp_path / "work"
    (work / "keep").mkdir(parents=True)
    (work / "keep" / "old").write_text("a checkpoint")
    (work / "other.sh").write_text('run() { "$1" --nproc-per-node 2 "${@:2}"; }\n')
    started = f'#!/bin/sh\nexec {tmp_path}/bin/torchrun --nproc-per-node 2 pretrain_gpt.py "$@"\n'
    programs.executable(work / "started.sh", started)
    (tmp_path / "bin" / "lib.so").write_bytes(b"\x7fELF no library")
    (work / "x").write_text("text\n")
    os.mkfifo(work / "fifo")
    return work


def tree(folder):
    """Every file below a folder, with what is in it and when it changed."""
    return {
        (str(path.relative_to(folder)), path.lstat().st_mode, path.lstat().st_mtime_ns): (
            path.is_file() and path.read_bytes()
        )
        for path in folder.rglob("*")
    }


def read(place, text):
    """A script's command; nothing was started, changed, or left running."""
    text = text.replace("BIN", str(place.parent / "bin"))
    script = place / "train.sh"
    script.write_text(text)
    before = tree(place.parent)
    try:
        return shell_script.resolve(ShellScript((str(script),)), place)
    finally:
        assert tree(place.parent) == before
        deadline = time.monotonic() + 100  # what was killed may take a moment to go
        while running(str(script)) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not running(str(script))


def running(word):
    """The processes with a word in their commands."""
    commands = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]
    return [words for words in commands if words and word in words]


@pytest.mark.parametrize("text", STARTS.values(), ids=STARTS)
def test_nothing_is_started(place, text):
    """However a script starts its training, that is read and not run."""
    command = read(place, text)
    assert (command.script, command.arguments) == ("pretrain_gpt.py", ("--num-layers", "4"))
    assert command.ranks == 2


@pytest.mark.parametrize("text", EFFECTS.values(), ids=EFFECTS)
def test_nothing_is_changed(place, text):
    """What a script does before its training is not done."""
    with subprocess.Popen(["sleep", "100"], start_new_session=True) as victim:
        try:
            command = read(place, f"{text.replace('VICTIM', str(victim.pid))}\nBIN/{RUN}")
            assert victim.poll() is None
        finally:
            victim.kill()
    assert command.ranks == 2


@pytest.mark.nightly
@pytest.mark.parametrize("text", STRANGE.values(), ids=STRANGE)
def test_strange_scripts(place, monkeypatch, text):
    """Each is read as the training that it starts, or refused in one line."""
    monkeypatch.setattr(shell_script, "_SECONDS", 5)
    try:
        command = read(place, text)
    except TTraceError as refusal:
        command = str(refusal)
    if isinstance(command, Command):
        assert (command.script, command.arguments) == ("pretrain_gpt.py", ("--num-layers", "4"))
        assert command.ranks == 2
    else:
        assert command.isprintable()
    assert not Path("/dev/shm/ttrace-canary").exists()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (
            "N=$(nvidia-smi -L | wc -l)\ntorchrun --nproc-per-node $N pretrain_gpt.py -x",
            "nvidia-smi",
        ),
        ("N=$(python count.py)\ntorchrun --nproc-per-node $N pretrain_gpt.py -x", "python"),
        (f'eval "$(python arguments.py)"\n{RUN} $MORE', "python"),
        (f"source <(python arguments.py)\n{RUN} $MORE", "python"),
        (f"if python -c 'import apex'; then MORE=--fused; fi\n{RUN} $MORE", "python"),
        (f"python arguments.py > made\n{RUN} $(cat made)", "python"),
        (f"cp keep/old made\n{RUN} $(cat made)", "cp"),
        (f"sed -i s/a/b/ keep/old\n{RUN} $(cat keep/old)", "sed"),
        (f"python arguments.py --out=made\nsource made\n{RUN} $MORE", "python"),
    ],
)
def test_what_cannot_be_known(place, text, name):
    """A command that depends on a program that was not run is refused, in one line."""
    with pytest.raises(TTraceError, match=rf"\b{name}\b.*read, not run") as raised:
        read(place, text)
    assert "\n" not in str(raised.value)


def test_what_can_be_known(place):
    """Readers run, and a script reads what it wrote."""
    text = (
        'set -euo pipefail\nHERE=$(cd "$(dirname "$0")" && pwd)\nsource $HERE/other.sh\n'
        "mkdir -p logs\ncat <<EOF > logs/args\n--num-layers $(echo 4 | tr 4 8)\nEOF\n"
        "echo --seed >> logs/args; date +%N >> logs/args\nnvidia-smi | tee logs/gpus\n"
        "run torchrun pretrain_gpt.py $(cat logs/args) --save $HERE 2> logs/errors"
    )
    command = read(place, text)
    assert command.arguments[:3] == ("--num-layers", "8", "--seed")
    assert command.arguments[4:] == ("--save", str(place))
    assert command.ranks == 2


def test_preparation_is_not_the_training(place):
    """A script of Python before a launcher's command."""
    assert read(place, f"python BIN/prepare.py --out x\n{RUN}").ranks == 2


@pytest.mark.parametrize("first", ["#!/bin/zsh", "#!/usr/bin/env python3"])
def test_another_language(place, first):
    """Only bash is read."""
    with pytest.raises(TTraceError, match=r"train\.sh is a script for (zsh|python3)"):
        read(place, f"{first}\n{RUN}")


def test_without_the_guard(place, monkeypatch):
    """Nothing is run where the kernel cannot guard it."""
    monkeypatch.setattr(guard.platform, "machine", lambda: "vax")
    with pytest.raises(TTraceError, match="cannot be read safely on this machine"):
        read(place, f"BIN/{RUN}")


@pytest.mark.parametrize(
    ("text", "folder"),
    [
        ("cd there\ntorchrun pretrain_gpt.py --bf16", "there"),
        ("srun -n 2 bash -c 'cd there && python pretrain_gpt.py --bf16'", "there"),
        ("cd there; srun bash -c 'cd ../this; python pretrain_gpt.py --bf16'", "there/../this"),
        ("srun bash -c 'cd there; bash inner.sh'", "there"),
        ("(cd there)\ntorchrun pretrain_gpt.py --bf16", ""),
    ],
)
def test_another_folder(tmp_path, text, folder):
    """The script is named as seen from where the shell has changed to."""
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "inner.sh").write_text("python pretrain_gpt.py --bf16")
    command = resolve(tmp_path, text)
    assert (command.script, command.arguments) == ("pretrain_gpt.py", ("--bf16",))
    assert command.folder == (str(tmp_path / folder) if folder else "")
