# SPDX-License-Identifier: Apache-2.0
"""Shell scripts that try to start a program or to change a file while they are only read."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from pathlib import Path

from megatron_ttrace.jobs.commands import shell_script
from megatron_ttrace.jobs.commands.command_line import ShellScript
from megatron_ttrace.trace.errors import TTraceError
from tests.faults.experiment import Experiment
from tests.faults.fault import Family, Fault, Problem, changed, printed, state_of

JOB = "pretrain_gpt.py --num-layers 4"
RUN = f"torchrun --nproc-per-node 2 {JOB}"
STARTS = {
    "loader": "/lib64/ld-linux-x86-64.so.2 BIN/torchrun --nproc-per-node 2 " + JOB,
    "env-split": f"env -S 'BIN/{RUN}'",
    "git-alias": f"git -c alias.x='!BIN/{RUN}' x\n{RUN}",
    "sed-execute": f"echo x | sed '1e BIN/{RUN}'\n{RUN}",
    "awk-pipe": f"awk 'BEGIN {{ print 1 | \"BIN/{RUN}\" }}'\n{RUN}",
    "awk-getline": f"awk 'BEGIN {{ \"BIN/{RUN}\" | getline x }}'\n{RUN}",
    "sort-compress": f"seq 9 | sort -S 1b --compress-program=BIN/torchrun\n{RUN}",
    "tar-action": f"tar cf x.tar --checkpoint-action=exec=BIN/torchrun --checkpoint=1 .\n{RUN}",
    "find-in-place": f"find . -maxdepth 0 -execdir BIN/torchrun ';'\n{RUN}",
    "reader-by-link": f"ln -s BIN/torchrun ./cat\n./cat x\n{RUN}",
    "reader-by-name": f"BIN/cat x\n{RUN}",
    "reader-on-path": f"PATH=BIN:$PATH\nls\n{RUN}",
    "hashed": f"hash -p BIN/torchrun cat\ncat x\n{RUN}",
    "environment-file": f"BASH_ENV=BIN/activate bash -c 'BIN/{RUN}'",
    "prompt-command": f"export PROMPT_COMMAND='BIN/{RUN}'\nbash -i <<< true\n{RUN}",
    "debug-trap": f"trap 'BIN/torchrun' DEBUG\n{RUN}",
    "mapfile-callback": f"mapfile -C 'BIN/torchrun #' -c 1 X <<< a\n{RUN}",
    "preloaded": f"LD_PRELOAD=BIN/lib.so cat x\n{RUN}",
    "loaded-builtin": f"enable -f BIN/lib.so torchrun\n{RUN}",
    "parallel": f"echo 1 | parallel BIN/torchrun\n{RUN}",
    "remote": f"ssh localhost BIN/torchrun; at now <<< BIN/torchrun; crontab BIN/torchrun\n{RUN}",
    "printed-script": f"printf 'BIN/{RUN}\\n' | bash -s",
    "source-of-a-string": f"source /dev/stdin <<< 'BIN/{RUN}'",
    "arithmetic-index": f"X='a[$(BIN/torchrun)]'\n(( X )) || true\n{RUN}",
    "perl-and-ruby": f"perl -e 'exec \"BIN/torchrun\"'; ruby -e 'exec \"BIN/torchrun\"'\n{RUN}",
    "lock": f"flock keep/old BIN/{RUN}",
    "typescript": f"script -qc 'BIN/{RUN}' /dev/null\n{RUN}",
}
"""Ways to run one of the canaries in ``BIN``; a job of two ranks, if it is read at all."""
EFFECTS = {
    "shared-memory": f"echo x > /dev/shm/ttrace-canary; echo 1 > /proc/self/oom_score_adj\n{RUN}",
    "read-and-write": f"exec 3<>keep/old; echo x >&3; exec 3>&-\n{RUN}",
    "appended": f"cat x >> keep/old; history -w keep/old; printf x > >(cat > keep/old)\n{RUN}",
    "in-place": f"dd if=/dev/zero of=keep/old; truncate -s 0 keep/old; mkfifo keep/f\n{RUN}",
    "awk-writes": f'awk \'BEGIN {{ print 1 > "keep/old"; close("keep/old") }}\'\n{RUN}',
    "sed-writes": f"echo x | sed 'w keep/old'; sed --in-place=b s/a/b/ keep/old\n{RUN}",
    "sort-writes": f"sort -o keep/old x; uniq x keep/old; tee keep/old < x\n{RUN}",
    "moved-folder": f"cd keep && mv old new; cd ..; rm -rf keep .[!.]*; rename a b keep/*\n{RUN}",
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
"""What must have no effect outside of the script; half of it never ends."""
PROGRAMS = "torchrun python srun cat ls".split()


@dataclasses.dataclass(frozen=True, slots=True)
class Script:
    """A shell script, read among canaries and files that must stay as they are."""

    text: str

    def inject(self, experiment: Experiment) -> None:
        """Read it."""
        x, x.injected = experiment, True
        work, programs = x.home / "work", x.home / "bin"
        (work / "keep").mkdir(parents=True)
        programs.mkdir()
        for program in PROGRAMS:
            mark = str(x.home / "ran")
            (programs / program).write_text(f"#!{sys.executable}\nopen({mark!r}, 'w')\n")
            (programs / program).chmod(0o755)
        (programs / "activate").write_text(f"touch {x.home}/ran\n")
        (programs / "lib.so").write_bytes(b"\x7fELF no library")
        (work / "keep" / "old").write_text("a checkpoint")
        (work / "x").write_text("text\n")
        os.mkfifo(work / "fifo")
        script = work / "train.sh"
        script.write_text(self.text.replace("BIN", str(programs)))
        times = {path: path.lstat().st_mtime_ns for path in x.home.rglob("*")}
        before, began = state_of(x.home), time.monotonic()
        try:
            found = shell_script.resolve(ShellScript((str(script),)), work)
            x.said = str(found)
            if (found.script, *found.arguments) != tuple(JOB.split()) or found.ranks != 2:
                x.problem(Problem.MISREAD, x.said)
        except TTraceError as error:
            x.said = f"refused: {error}"
            x.problems += printed(str(error))
            if "\n" in str(error):
                x.problem(Problem.NO_LINE, "several lines")
        if time.monotonic() - began > 120:
            x.problem(Problem.HANG, f"{time.monotonic() - began:.0f} s")
        x.problems += changed(before, x.home, new=True)
        if touched := [path for path, when in times.items() if path.lstat().st_mtime_ns != when]:
            x.problem(Problem.FOREIGN, str(touched[:5]))
        if Path("/dev/shm/ttrace-canary").exists():
            x.problem(Problem.FOREIGN, "/dev/shm")


FAULTS = tuple(
    Fault(f"script-{name}", Family.SCRIPTS, Script(text))
    for name, text in (STARTS | EFFECTS).items()
)
