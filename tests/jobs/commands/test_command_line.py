# SPDX-License-Identifier: Apache-2.0
"""The script, its arguments and the ranks in commands as users have them."""

import contextlib
import dataclasses
import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.run import get_args_parser

from megatron_ttrace.jobs.commands.command_line import Command, ShellScript, parse
from megatron_ttrace.trace.errors import TTraceError

WORDS = st.lists(
    st.text(st.characters(blacklist_categories=("Cs", "Cc")), min_size=1)
    .map(str.strip)
    .filter(bool),
    max_size=6,
)
MODULES = [
    "python -m torch.distributed.run",
    "python -mtorch.distributed.run",
    "python -um torch.distributed.run",
    "python -X dev -umtorch.distributed.launch",
]
LAUNCHERS = {
    "torchrun --nproc-per-node 8 --nnodes=2 --master_addr localhost": (16, 2),
    "torchrun --nnodes 1:4 --nproc-per-node 8 --tee 3 --redirects 3": (32, 4),
    "python3.12 -u -X dev -m torch.distributed.launch --nproc_per_node 2": (2, 1),
    "/opt/venv/bin/python": (None, 1),
    "python -u -W ignore": (None, 1),
    "ft_launcher --nproc_per_node 8 --max-restarts=3": (8, 1),
    "uv run --no-sync python -m torch.distributed.run --nproc_per_node 8": (8, 1),
    "srun -N 4 --ntasks-per-node=8 --container-image=x.sqsh python": (32, 4),
    "srun --nodes=4 torchrun --nproc-per-node 8 --nnodes 4": (32, 4),
    "nsys profile -o out --force-overwrite true torchrun --nproc-per-node 2": (2, 1),
    "numactl --cpunodebind=0 python": (None, 1),
    "nohup env": (None, 1),
    ".venv/bin/accelerate launch --multi_gpu --num-processes=8 --num_machines 2": (8, 2),
    "deepspeed --num_gpus 4 --num_nodes 2": (8, 2),
    "torchrun --nproc-per-node 2 --no-python python -u": (2, 1),
    "torchrun --nproc_per_node=2 --no_python .venv/bin/python3.12": (2, 1),
    ".venv/bin/torchrun --nproc-per-node 2": (2, 1),
    "": (None, 1),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
@settings(max_examples=25)
@given(arguments=WORDS)
def test_every_launcher(launcher, arguments):
    """Arguments come through unchanged, whatever they look like.

    Between a launcher's programs stands a colon, so one alone is refused behind some of them.
    """
    if ":" in arguments:
        with contextlib.suppress(TTraceError):
            assert parse([*launcher.split(), "a.py", *arguments]).arguments == tuple(arguments)
        return
    ranks, nodes = LAUNCHERS[launcher]
    words = ["CUDA_DEVICE_MAX_CONNECTIONS=1", "A=b=c", *launcher.split(), "dir/pretrain_gpt.py"]
    command = parse([*words, *arguments])
    assert dataclasses.replace(command, interpreter="") == Command(
        "dir/pretrain_gpt.py",
        tuple(arguments),
        {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "A": "b=c"},
        ranks,
        nodes,
    )


@given(arguments=WORDS)
def test_a_whole_paste(arguments):
    """One word with line continuations, redirections and a pipe, as a shell would read it."""
    lines = " \\\n    ".join(
        ["torchrun --nproc-per-node 2 pretrain_gpt.py", *map(shlex.quote, arguments)]
    )
    text = f"# train\nexport A=1\nexport B=2; {lines} > log.txt 2>&1 &\n"
    command = parse([text])
    assert command == Command("pretrain_gpt.py", tuple(arguments), {"A": "1", "B": "2"}, 2, 1)


def test_what_a_paste_assigns_is_used():
    """And what the environment has; nothing else is."""
    text = "P=/data\npython x.py --a $P/b --c ${P}x --d '$Q' \"\\$P\" ${H}"
    command = parse([text], {"H": "home"})
    assert command.arguments == ("--a", "/data/b", "--c", "/datax", "--d", "$Q", "$P", "home")


LINES = [
    "--a 1\n--b 2\n--c",
    "--a 1 \\\n  --b 2 \\ \n --c\n",
    "--a 1\r\n--b 2 \\\r\n--c\r\n",
    "\n\n  --a 1 # one\n\n # two\n\t--b 2\n#\n--c\n\n",
    "--a\\\n 1 --b\n-- 2 --c",
]


@pytest.mark.parametrize("lines", LINES)
def test_every_line_of_a_text(lines):
    """A line that begins with ``-`` continues the command, whatever is between."""
    command = parse([f"torchrun --nproc-per-node 2 pretrain_gpt.py {lines}"])
    words = [word for word in command.arguments if word != "--"]
    assert (words, command.ranks) == (["--a", "1", "--b", "2", "--c"], 2)


@pytest.mark.parametrize(
    "text",
    [
        "python x.py -a; cd /x",
        "python x.py -a | tee log",
        "python x.py -a\n0.5 data",
        "( python x.py -a )",
        "ls\n-l",
        "python x.py $(cat job.txt)",
        "python x.py `cat job.txt`",
        "python x.py -a $UNKNOWN",
        "python x.py -a ${A:-1}",
        "python x.py -a > >(tee log) -b",
        "python x.py -a <(cat job.txt)",
        "python x.py -a <<EOF\n-b\nEOF",
        "python x.py -a \\\n> -b",
        "$ python x.py -a \\\n> -b",
        "```bash\npython x.py\n-b\n```",
        "A=1 python x.py -a $A",
        "python x.py -a /data/{a,b}",
        "python x.py -a {1..3}",
        "python x.py -a $'b'",
        'python x.py -a $"b"',
        "python x.py -a ~user/b",
    ],
)
def test_what_a_text_must_not_have(text):
    """Other commands and what only a shell could evaluate are refused, not dropped."""
    with pytest.raises(TTraceError, match=r"alone|has no value here|shell syntax") as raised:
        parse([text])
    assert "\n" not in str(raised.value)


def test_redirections_amid_a_text():
    """Whatever they are written like, what follows them is read."""
    text = "python x.py -a 12>f {g}>>h 2>&- >| 'i j' >k\\ l <<< m -b ~/n >& o"
    assert parse([text], {"HOME": "/h"}).arguments == ("-a", "-b", "/h/n")


LAUNCHED = {
    "srun": ({"-n": 4, "--ntasks": 4}, {"-N": 2, "--nodes": 2}, {"--ntasks-per-node": 2}),
    "mpirun": ({"-n": 4, "-np": 4, "--np": 4, "-c": 4}, {}, {}),
    "mpiexec": ({"-n": 4, "-np": 4, "--n": 4}, {}, {}),
    "horovodrun": ({"-np": 4, "--num-proc": 4}, {}, {}),
    "accelerate launch": ({"--num_processes": 4, "--num-processes": 4}, {"--num_machines": 2}, {}),
    "deepspeed": ({}, {"--num_nodes": 2}, {"--num_gpus": 2}),
}
"""Launchers, and options for tasks, nodes and tasks per node."""
OTHERS = {"srun": ["-l", "-J name", "--mpi=pmix", "-u"], "mpirun": ["--oversubscribe", "-x A=1"]}
PROGRAMS = ["python", "python -u", "bash -c", "python3.12 -X dev -W ignore", "env A=1 python"]


def written(draw, launcher, option, value):
    """An option in one of the ways in which its launcher reads it."""
    forms = [[option, str(value)]]
    if option.startswith("--"):
        forms.append([f"{option}={value}"])
    elif launcher == "srun":
        forms += [[f"{option}{value}"], [f"-l{option[1]}{value}"], [f"-l{option[1]}", str(value)]]
    return draw(st.sampled_from(forms))


@st.composite
def launched(draw):
    """A launcher's words, whether it has said a number of tasks, and how many nodes."""
    launcher = draw(st.sampled_from(sorted(LAUNCHED)))
    total, nodes, per_node = LAUNCHED[launcher]
    # Tasks in all, or per node on two nodes.
    chosen = [total] if total and (draw(st.booleans()) or not per_node) else [nodes, per_node]
    words = [
        written(draw, launcher, option, options[option])
        for options in chosen
        for option in [draw(st.sampled_from(sorted(options)))]
    ]
    more = st.lists(st.sampled_from(OTHERS.get(launcher, ["--verbose"])), max_size=2)
    words = draw(st.permutations([*words, *(other.split() for other in draw(more))]))
    return [*launcher.split(), *(word for group in words for word in group)]


@given(launched(), st.sampled_from(PROGRAMS), st.booleans())
def test_every_way_to_write_a_number(launcher, program, is_script):
    """Of a Python script, and of a shell script, which starts it."""
    words = [*launcher, *program.split()]
    if program == "bash -c":
        command = parse([*words, "python -u pretrain_gpt.py --bf16"])
    elif is_script:
        script = parse([*launcher, "bash", "-eo", "pipefail", "train.sh", "2"])
        assert script.words == ("train.sh", "2")
        command = parse(["python", "pretrain_gpt.py", "--bf16"], tasks=script.tasks)
    else:
        command = parse([*words, "pretrain_gpt.py", "--bf16"])
    assert (command.script, command.arguments) == ("pretrain_gpt.py", ("--bf16",))
    assert command.ranks == 4
    assert command.uncounted == ""


@st.composite
def torchruns(draw):
    """Options of torchrun's own parser, each in one of its forms."""
    words = []
    for action in draw(st.lists(st.sampled_from(TORCHRUN._actions[1:-2]), max_size=6)):
        if action.dest in ("module", "print_completion"):
            continue
        option = draw(st.sampled_from(action.option_strings))
        if action.nargs == 0:
            words.append(option)
            continue
        value = draw(st.sampled_from(action.choices or ["1", "3", "8"]))
        forms = [[option, value], [f"{option}={value}"]]
        words += draw(st.sampled_from([*forms, *([[option + value]] * (option[1] != "-"))]))
    return [*words, *draw(st.sampled_from([[], ["--"]]))]


TORCHRUN = get_args_parser()


@given(torchruns(), st.sampled_from(["torchrun", *MODULES]))
def test_torchrun_reads_the_same(options, program):
    """Its own parser finds this script, these arguments and these numbers."""
    words = [*options, "pretrain_gpt.py", "--bf16", "-t", "3"]
    expected = TORCHRUN.parse_args(words)
    command = parse([*program.split(), *words])
    assert command.script == expected.training_script == "pretrain_gpt.py"
    assert command.arguments == tuple(expected.training_script_args)
    nodes = int(expected.nnodes.split(":")[-1])
    assert (command.ranks, command.nodes) == (int(expected.nproc_per_node) * nodes, nodes)


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        ("srun -N 2 -n 2 torchrun --nnodes 2 --nproc-per-node 4 x.py", 8),
        ("srun -N 2 torchrun --nnodes 1:4 --nproc-per-node 4 x.py", 8),
        ("srun -N 2 accelerate launch --num_machines 2 --num_processes 16 x.py", 16),
        ("srun -N 4 python x.py", 4),
        ("srun -n 2 nice -n 10 python x.py", 2),
        ("nice -n 10 python x.py", None),
        ("numactl -N 1 python x.py", None),
        ("nice -n 10 srun -n 2 python x.py", 2),
        ("mpirun -np 4 srun -n 4 python x.py", 4),
        # Options of torchrun have defaults in the environment; ``--`` ends them.
        ("PET_NPROC_PER_NODE=4 PET_NNODES=2 torchrun --standalone -- x.py", 8),
    ],
)
def test_launchers_within_launchers(words, ranks):
    """A wrapper's options are its own."""
    assert parse(words.split()).ranks == ranks


@pytest.mark.parametrize(
    ("words", "uncounted"),
    [
        ("mpirun python x.py", "mpirun without a number"),
        ("srun -n 2-4 python x.py", "srun '-n'"),
        ("accelerate launch x.py -a", "accelerate without a number"),
        ("torchrun --standalone --nproc-per-node gpu x.py -a", "--nproc-per-node gpu"),
    ],
)
def test_numbers_that_are_not_said(words, uncounted):
    """The machine, a host file, or a configuration file would decide; none is read."""
    command = parse(words.split())
    assert (command.ranks, command.uncounted) == (None, uncounted)


@pytest.mark.parametrize(
    "words",
    [
        "srun -n 2 --export=ALL,A=1,B=2 python x.py -a",
        "srun -n 2 --export ALL,A=1,B=2 python x.py -a",
        "mpirun -np 2 -x A=1 -x B=2 python x.py -a",
        "docker run -e A=1 --env B=2 image torchrun --nproc-per-node 2 x.py -a",
    ],
)
def test_variables_that_a_launcher_sets(words):
    assert parse(words.split()) == Command("x.py", ("-a",), {"A": "1", "B": "2"}, 2)


@pytest.mark.parametrize(
    ("text", "environment", "unset"),
    [
        ("export PYTHONPATH=/m:$PYTHONPATH A=$(b); python x.py", {"PYTHONPATH": "/m:/theirs"}, ()),
        ("export A=1; B=2 ls; C=3 python x.py", {"A": "1", "C": "3"}, ()),
        ("A=1; unset -v A B; export B=2; python x.py", {"B": "2"}, ("A", "B")),
    ],
)
def test_variables_of_a_shell_within(text, environment, unset):
    """It inherits them, and gives none of another command's to the training."""
    command = parse(["bash", "-c", text], {"PYTHONPATH": "/theirs"})
    assert command == Command("x.py", (), environment, None, 1, unset)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["srun", "-l", "bash", "-xc", "cd /m; git status; python /m/x.py --a '[0]*3'"],
            Command("/m/x.py", ("--a", "[0]*3")),
        ),
        (["bash -c 'bash -c \"python x.py -a\"'"], Command("x.py", ("-a",))),
        (["python x.py -a !$"], Command("x.py", ("-a", "!$"))),
        (["'' python x.py -a"], Command("x.py", ("-a",))),
        # Only what the training is given matters.
        (
            [
                *("bash", "-c"),
                "cd ~/m && echo $(date) {a,b} > \"$LOG\"; A=$B torchrun --node-rank $N x.py '$X'",
            ],
            Command("x.py", ("$X",), {}, 1),
        ),
        # Where ``cd`` leads, if not only a shell knows that.
        (["bash", "-c", "cd /m && cd -P n; python x.py"], Command("x.py", (), folder="/m/n")),
        (["bash", "-c", "cd /m || exit 1\npython x.py"], Command("x.py", (), folder="/m")),
        (["cd /m && cd n\n A=1 python x.py"], Command("x.py", (), {"A": "1"}, folder="/m/n")),
        (["bash", "-c", "cd $(git rev-parse --show-cdup); python x.py"], Command("x.py", ())),
    ],
)
def test_a_shell_within(words, expected):
    """Slurm scripts give the command as one word; what only an interactive one expands stays."""
    assert parse(words) == expected


@pytest.mark.parametrize("text", ["{}", "bash -c '{}'"])
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("$MORE -b", ("-c", "1", "-b")),
        ('"$MORE" -b', (" -c 1 ", "-b")),
        ("x$MORE$MORE$NONE", ("x", "-c", "1", "-c", "1")),
        ('$NONE -b "$NONE"', ("-b", "")),
        ("-b $NONE", ("-b",)),
    ],
)
def test_variables_with_several_words(text, words, expected):
    """As a shell splits them, unless they are quoted."""
    environment = {"MORE": " -c 1 ", "NONE": ""}
    command = parse([text.format(f"A=$MORE python x.py {words}")], environment)
    assert command == Command("x.py", expected, {"A": " -c 1 "})


@pytest.mark.parametrize("words", [["bash", "-x", "t.sh", "a"], ["./t.sh", "a"]])
def test_a_shell_script(words):
    """Is recognised; what it starts only a shell knows."""
    assert parse(["A=1", *words]) == ShellScript((words[-2], "a"), {"A": "1"})


@given(st.lists(st.text(), max_size=5))
def test_any_words(words):
    """A command or one line, for whatever is given."""
    with contextlib.suppress(TTraceError):
        assert isinstance(parse(words), Command | ShellScript)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        # No training script.
        (["ls", "-l"], "no training script.*e.g. ttrace check -- torchrun"),
        (["torchrun", "--nproc-per-node", "2"], "no training script"),
        (["A=1"], "no training script"),
        (["python", "-c", "print()"], "no training script"),
        (["python", "-m", "package"], "package is not a training script"),
        (["torchrun", "-m", "package", "x"], "run as a module"),
        (["python 'x.py"], "cannot be split"),
        (["python x.py\u00a0-a"], "cannot be split"),
        (["python x.py\f-a"], "cannot be split"),
        (["for i in 1 2; do python x.py -a $i; done"], "no training script"),
        ([""], "no training script"),
        # Contradictions, and what would be half understood.
        (
            "srun -n 4 torchrun --nproc-per-node 2 x.py".split(),
            "starts torchrun 4 times, but its --nnodes is 1",
        ),
        ("mpirun -np 4 srun -n 2 python x.py".split(), "different numbers"),
        ("srun --nta 4 python x.py".split(), "abbreviated"),
        ("torchrun --nproc 2 x.py".split(), "abbreviated"),
        ("torchrun --stand --nproc-per-node 2 x.py".split(), "abbreviated"),
        ("torchrun --nnodes --nproc-per-node 8 x.py".split(), "has no value"),
        ("torchrun --nproc-per-node 8 --master_port x.py -a 1 2".split(), "port has no value"),
        ("torchrun --master_addr --master_port 1 x.py".split(), "addr has no value"),
        ("mpirun bash x.sh".split(), "mpirun without a number leaves"),
        ("mpirun -np 1 python x.py : -np 1 python y.py".split(), "several"),
        # What would change what the job inherits.
        (["PATH+=:/x", "torchrun", "x.py"], "appends to a variable"),
        (["env", "-u", "NCCL_ALGO", "torchrun", "x.py"], "removes variables"),
        # After ``bash -c`` a line is a command, also one that begins with ``-``.
        (["bash", "-c", "torchrun x.py --a 1\n--b 2"], "in the text after -c, a line"),
        (["bash", "-c", "if true; then torchrun x.py; fi"], "only a shell can evaluate"),
        (["bash", "-c", "python a.py; python b.py"], "only a shell can evaluate"),
        (["bash", "-c", 'torchrun x.py "$@"', "_", "-a"], "only a shell can evaluate"),
        (["bash", "-c", "torchrun x.py $(cat job.txt)"], "only a shell can evaluate"),
        (["bash", "-c", "torchrun x.py -a {1,2}"], "only a shell can evaluate"),
        (["bash", "-c", "export NVTE_A=$(b); python x.py"], "only a shell can evaluate NVTE_A"),
        (["bash", "-c", "./train.sh $A"], "only a shell can evaluate"),
    ],
)
def test_refusals(words, message):
    """One line that says what to give."""
    with pytest.raises(TTraceError, match=message) as raised:
        parse(words)
    assert "\n" not in str(raised.value)
    assert "\0" not in str(raised.value)
