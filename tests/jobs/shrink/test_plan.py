# SPDX-License-Identifier: Apache-2.0
"""A large command becomes small ones, and every change is accounted for."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.jobs.commands.command_line import Command
from megatron_ttrace.jobs.shrink import documents, plan
from megatron_ttrace.jobs.shrink.command_flags import CommandFlags, Flag
from megatron_ttrace.mcore.options.decisions import option_of
from megatron_ttrace.mcore.options.roles import ROLES, Role
from megatron_ttrace.trace.errors import TTraceError

LARGE = """
--tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 --sequence-parallel
--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 8192
--max-position-embeddings 8192 --micro-batch-size 1 --global-batch-size 1536 --bf16 --swiglu
--use-distributed-optimizer --train-iters 100000 --lr 1e-4 --lr-warmup-iters 10 --save out
--load out --data-path 1 blend --vocab-size 50257 --fim-data --tokenizer-type GPT2BPETokenizer
--log-interval 1 --log-num-zeros-in-grad --no-rope-fusion --own-flag-of-a-script 7
"""


def shrunk(text=LARGE, ranks=1024, most=8):
    """The plan of a command."""
    return plan.shrink(Command("pretrain_gpt.py", tuple(text.split()), {}, ranks), most)


def test_what_is_kept_and_what_goes():
    """Code stays, sizes shrink, paths and logs go; unknown flags are Megatron's to judge."""
    job, *_ = shrunk().jobs
    flags = CommandFlags.parse(job.arguments)
    kept = "sequence_parallel bf16 swiglu use_distributed_optimizer fim_data log_num_zeros_in_grad"
    assert all(map(flags.has, kept.split()))
    assert flags.flag("apply_rope_fusion") == Flag("--no-rope-fusion")
    assert ("--own-flag-of-a-script", "7") in [(flag.name, *flag.values) for flag in flags.flags]
    gone = ("save", "load", "data_path", "log_interval", "lr_warmup_iters", "vocab_size")
    assert not any(map(flags.has, gone))
    assert job.axes.ranks == 8
    assert flags.text("tensor_model_parallel_size") == "2"
    assert flags.text("train_iters") == "3"


def test_the_account_is_complete():
    """Every flag is kept as it is, or stands in a row with its old value and its new one."""
    small = shrunk()
    job, *_ = small.jobs
    now = CommandFlags.parse(job.arguments)
    rows = {row.flag: row for row in small.rows}
    for flag in CommandFlags.parse(LARGE.split()).flags:
        if str(flag) in small.kept:
            assert now.flag(flag.option) == flag
        elif flag.option in ("vocab_size", "fim_data"):
            assert rows[flag.name].now is None
        elif now.has(flag.option):
            row = rows[flag.name]
            assert row.was == " ".join(flag.values)
            assert row.now == now.text(flag.option)
            assert row.why
        else:
            assert ROLES[flag.option] in plan.DROPPED
    assert rows["ranks"] == plan.Row("ranks", "1024", "8", "2 per axis")
    assert any("--load" in lost for lost in small.lost)
    assert "1024 ranks" in small.stands_for()


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("pretrain_vlm.py", "--img-h 336 --img-w 336 --patch-dim 14"),
        ("examples/bert/pretrain_bert.py", "--bert-no-binary-head --mask-prob 0.2"),
        ("examples/t5/pretrain_t5.py", "--short-seq-prob 0.2"),
    ],
)
def test_what_other_scripts_read_is_kept(script, flags):
    """Images' sizes decide how long samples are, for instance, and so whether they are padded."""
    command = Command(script, ("--num-layers", "8", *flags.split()), {}, 1)
    (job,) = plan.shrink(command, 8).jobs
    assert flags in " ".join(job.arguments)


def test_of_a_repeated_flag_the_last_counts():
    """As for Megatron's parser; the earlier ones go."""
    (job,) = shrunk("--num-layers 8 --bf16 --num-layers 16 --bf16", 1).jobs
    assert job.arguments.count("--num-layers") == 1
    assert job.arguments.count("--bf16") == 1


def test_a_middle_stage():
    """A pipeline of more than two stages keeps one, with the other axes or in a job of its own.

    If they fit, there are two of them: one then has three microbatches in flight.
    """
    for most, stages in ((8, 4), (6, 3)):
        text = "--pipeline-model-parallel-size 4 --tensor-model-parallel-size 2"
        (job,) = shrunk(text, 8, most=most).jobs
        assert (job.axes.tp, job.axes.pp, job.axes.ranks) == (2, stages, 2 * stages)
    assert [job.axes.pp for job in shrunk().jobs] == [2, 4, 1]
    interleaved = "--num-virtual-stages-per-pipeline-rank 4 --num-layers 32"
    for stages, kept in ((8, (4, 3)), (4, (3, 3)), (3, (3, 4))):
        (job,) = shrunk(f"--pipeline-model-parallel-size {stages} {interleaved}", stages).jobs
        assert (job.axes.pp, job.axes.chunks) == kept
    assert shrunk(most=2 * 3 * 2).jobs[0].axes.pp == 3


def test_multi_token_prediction_before_the_loss():
    """It stays on another rank than the embedding, also where axes do not fit into one job."""
    layout = "--num-layers 8 --pipeline-model-parallel-layout Ett|t*2|(tt|)*2m|L"
    text = f"{layout} --mtp-num-layers 1 --pipeline-model-parallel-size 3"
    small = shrunk(f"{text} --tensor-model-parallel-size 4", 48)
    assert [job.axes.pp for job in small.jobs] == [1, 3, 3]


def test_a_ring():
    """Of two ranks, the next is the previous one: four stay, here or in a job of its own."""
    gated = "--context-parallel-size 8 --experimental-attention-variant gdn"
    (job,) = shrunk(f"{gated} --tensor-model-parallel-size 2", 16).jobs
    assert (job.axes.tp, job.axes.cp, job.axes.ranks) == (2, 4, 8)
    # All-to-all divides the heads of a rank once more.
    assert CommandFlags.parse(job.arguments).integer("linear_num_key_heads") == 2 * 4
    small = shrunk("--context-parallel-size 4 --tensor-model-parallel-size 2", 16)
    assert [(job.axes.tp, job.axes.cp, job.axes.dp) for job in small.jobs] == [(2, 2, 2), (1, 4, 1)]
    assert small.lost[-1].endswith("with the other axes: one job has them alone")
    (job,) = shrunk("--context-parallel-size 6", 6).jobs
    assert job.axes.cp == 2


def test_two_ranks_of_more():
    """What only shows with a rank between two others is named, for axes without such a job."""
    text = "--tensor-model-parallel-size 4 --context-parallel-size 4 --pipeline-model-parallel-size"
    (first, *_) = shrunk(f"{text} 4", 256).lost[1:]
    assert first.startswith("more than two ranks along tp, dp:")
    assert not shrunk("--tensor-model-parallel-size 2", 4).lost


def test_several_jobs():
    small = shrunk(f"{LARGE} --context-parallel-size 4")
    assert len(small.jobs) > 1
    assert any("all axes in one job (tp, cp, pp, dp)" in text for text in small.lost)
    assert any("middle stages" in text for text in small.lost)
    assert all(job.axes.ranks <= 8 for job in small.jobs)
    for job in small.jobs:
        assert CommandFlags.parse(job.arguments).has("sequence_parallel") == (job.axes.tp > 1)


def test_several_jobs_of_which_the_first_has_no_pipeline():
    text = f"{LARGE} --pipeline-model-parallel-size 4 --num-experts 64"
    small = shrunk(f"{text} --expert-model-parallel-size 8", ranks=128, most=4)
    assert [job.axes.pp for job in small.jobs] == [1, 2, 2, 4]
    assert "middle stages" in small.lost[-1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--use-checkpoint-args", "--use-checkpoint-args: .* give them as flags"),
        ("--yaml-cfg x.yaml", "--yaml-cfg: Megatron ignores"),
        ("--perform-rl-step", "--perform-rl-step: "),
        ("--heterogeneous-layers-config-path x", "-path: its layers cannot be shrunk"),
        ("--heterogeneous-layers-config-encoded-json {}", "-json: its layers cannot be shrunk"),
    ],
)
def test_what_cannot_be_shrunk(text, message):
    """Is refused by name."""
    with pytest.raises(TTraceError, match=message):
        shrunk(f"{LARGE} {text}")
    with pytest.raises(TTraceError, match="before the first flag"):
        shrunk("stray --num-layers 2")
    with pytest.raises(TTraceError, match=r"does not fit 2 ranks.* give --max-ranks 4"):
        shrunk(most=2)


KEPT = sorted(
    name for name, role in ROLES.items() if role in (Role.CODE, Role.LAYOUT, Role.TRANSPORT)
)
SHRUNK_ANYWAY = {"data_parallel_random_init", "dataloader_type", "ddp_bucket_size", "lr"}


@given(st.lists(st.sampled_from(KEPT), unique=True, max_size=20))
def test_code_is_never_touched(options):
    """Flags that decide which code runs come through, whatever stands beside them."""
    words = [word for option in options for word in (f"--{option.replace('_', '-')}", "1")]
    (job,) = shrunk(f"--num-layers 8 --hidden-size 1024 {' '.join(words)}", 1).jobs
    flags = CommandFlags.parse(job.arguments)
    for option in set(options) - SHRUNK_ANYWAY:
        name = option_of(f"--{option.replace('_', '-')}")
        assert flags.has(name)
        assert flags.text(name) == "1"


WORDS = st.lists(st.sampled_from([*LARGE.split(), "--", "-1", "--num-experts", "0", "x=y", ""]))


@given(WORDS)
def test_any_arguments(words):
    """A plan or one line."""
    with contextlib.suppress(TTraceError):
        assert plan.shrink(Command("x.py", tuple(words))).jobs


def test_shrinking_again_changes_nothing():
    """What is small stays as it is: the same job."""
    job, *_ = shrunk().jobs
    (again,) = shrunk(" ".join(job.arguments), job.axes.ranks).jobs
    first, second = CommandFlags.parse(job.arguments), CommandFlags.parse(again.arguments)
    assert {str(flag) for flag in first.flags} == {str(flag) for flag in second.flags}


def test_masked_word_pieces_keep_their_data(tmp_path):
    """BERT and T5 need sentences and tokens for masks, which no data of ours has."""
    words = LARGE.split()
    scripts = {"pretrain_gpt.py": "GPTDataset", "pretrain_bert.py": "BERTMaskedWordPieceDataset"}
    kept = {}
    for name, text in scripts.items():
        script = tmp_path / name
        script.write_text(text, encoding="utf-8")
        job, *_ = plan.shrink(Command(str(script), tuple(words), {}, 1024)).jobs
        flags = CommandFlags.parse(job.arguments)
        kept[name] = [
            flags.text(option) for option in ("data_path", "vocab_size", "tokenizer_type")
        ]
        assert flags.has("num_layers")
        assert bool(documents.arguments(str(script), tmp_path)) == (name == "pretrain_gpt.py")
    assert kept["pretrain_gpt.py"] == ["", "", ""]
    assert kept["pretrain_bert.py"] == ["1 blend", "50257", "GPT2BPETokenizer"]


def test_axes_as_they_are():
    """A layout that is to be checked itself keeps the sizes of its axes; all else shrinks."""
    words = "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --num-layers 96 "
    words += "--num-attention-heads 96 --hidden-size 12288 --seq-length 8192"
    (job,) = plan.as_it_is(Command("pretrain_gpt.py", tuple(words.split()), {}, 8)).jobs
    flags = CommandFlags.parse(job.arguments)
    assert job.axes.ranks == 8
    assert flags.text("tensor_model_parallel_size") == "4"
    assert flags.integer("num_layers") == 4
    assert flags.integer("num_attention_heads") % 4 == 0
    assert flags.integer("hidden_size") < 1000


def test_some_axes_of_a_job_with_conversations(monkeypatch):
    """Without the packages that read them it trains on text, with all axes and with fewer."""
    monkeypatch.setattr(plan.documents, "can_chat", lambda: False)
    command = Command("pretrain_gpt.py", ("--sft", "--tensor-model-parallel-size", "2"), {}, 2)
    for job in (*plan.shrink(command).jobs, plan.with_axes(command, ())):
        assert "--sft" not in job.arguments
