# SPDX-License-Identifier: Apache-2.0
"""The terminal report: the answer first, nothing hidden, 80 columns."""

from __future__ import annotations

import dataclasses
import io
import shlex
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from rich.console import Console

from megatron_ttrace.diagnose.culprits import owner
from megatron_ttrace.report import html, junit, publish, table, terminal, wandb, wording
from megatron_ttrace.report.texts import verdict_of
from megatron_ttrace.trace.executed import ChangedCode, ChangedFunction, Execution
from megatron_ttrace.trace.findings import Cause, Explanation, FailingRanks, PartialSums
from megatron_ttrace.trace.judged import Judged
from megatron_ttrace.trace.outcomes import NotExercised, Unexercised
from megatron_ttrace.trace.records import (
    STEP_LEVEL,
    Code,
    Exactness,
    Kind,
    Outcome,
    Result,
    Run,
    Summary,
    Verdict,
)
from tests.diagnose.judged_by_hand import localise
from tests.report.synthetic_report import make_judged, make_summary, make_verdict

Check = tuple[Summary, list[Verdict]]


def text_of(check: Check, directory: Path = Path("ttrace-out"), **options: object) -> str:
    """The report as it goes into a log."""
    file = io.StringIO()
    terminal.render(*check, Console(file=file, **options), directory)  # type: ignore[arg-type]
    return file.getvalue()


def test_a_pass_fits_one_screen(healthy: Check, tmp_path: Path) -> None:
    """Answer, counts, layout, worst margin, timings, files, notices and unchecked."""
    file = io.StringIO()
    publish(*healthy, tmp_path, wandb=False, console=Console(file=file))
    text = file.getvalue()
    assert len(text.splitlines()) <= 20
    assert text.startswith("ttrace  equivalent  ")
    for part in (
        "848: 841 pass, 0 fail, 7 unchecked",
        "7 blind",
        "tp 2 × pp 2, 4 ranks",
        "worst      margin 0.",
        "forward 0.",
        "reference 8.1 s",
        "dropout is off",
        f"files      {tmp_path}/report.html\n           {tmp_path}/verdicts.jsonl\n",
    ):
        assert part in text
    assert "WARNING" not in text


def test_piped_output_is_plain(diverged: Check) -> None:
    """No colour, no box drawing, no line beyond 80 columns."""
    text = text_of(diverged, width=200)
    assert "\x1b" not in text
    assert not set("│┃━─┏└") & set(text)
    assert max(map(len, text.splitlines())) <= 80


def test_a_divergence_names_the_culprit_first(diverged: Check) -> None:
    """Everything that a person needs to act stands above the table."""
    text = text_of(diverged)
    lines = text.splitlines()
    assert lines[0].startswith("ttrace  diverged")
    assert lines[2] == "culprit    embedding.word_embeddings"
    top = text[: text.index("tensors ")]
    for part in (
        "forward (output.0, iteration 1, microbatch 0) on ranks 1,3",
        "10.4 % (13.3 ε), tolerance 8.00e-3, margin 13×",
        "its input passes and its output does not",
        "\ncause      half of the rows are zero on tp rank 1\n",
        "\nhint       the vocabulary mask is computed from shifted ids\n",
        "\nlook at    VocabParallelEmbedding in",
        "megatron/core/tensor_parallel/layers.py:185",
    ):
        assert part in top


def test_what_is_not_known_is_left_out(diverged: Check) -> None:
    """An unknown cause is said; no hint and no place are not."""
    summary, verdicts = diverged
    bare = dataclasses.replace(
        summary.culprits[0], explanation="unknown", hint="", where="", cause=None
    )
    text = text_of((dataclasses.replace(summary, culprits=(bare,)), verdicts))
    assert "\ncause      unknown\n" in text
    assert "\nhint " not in text
    assert "\nlook at " not in text


def test_the_table_is_capped_and_says_so(diverged: Check) -> None:
    """Fifteen rows, the culprit's first, and the number of the others."""
    text = text_of(diverged)
    table = text[text.index("worst tensor of each layer") :].splitlines()
    assert sum("×" in line for line in table) == terminal.MAX_ROWS
    assert "and 15 more rows with failures in report.html" in table
    assert table[1].startswith("embedding.word_embeddings output ")


def test_names_are_never_cut() -> None:
    """Two experts of two layers differ in the table; a long name has a line of its own."""
    names = [
        f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc{layer + 1}"
        for layer in range(2)
        for expert in (7, 17)
    ]
    verdicts = [make_verdict(name, verdict=Outcome.DIVERGED, rel_err=2.0) for name in names]
    lines = text_of((make_summary(verdicts), verdicts)).splitlines()
    assert f"{names[0]} output" in lines
    assert f"{names[2]} output" in lines
    assert "…" not in "".join(lines)
    assert max(map(len, lines)) <= 80


def test_paths_can_be_copied(diverged: Check, tmp_path: Path) -> None:
    """However long: each in one piece, on a line that it ends."""
    folder = tmp_path / ("long-name" * 12)
    publish(*diverged, folder, wandb=False, console=Console(file=io.StringIO()))
    lines = text_of(diverged, folder).splitlines()
    for name in ("report.html", "verdicts.jsonl", "summary.json"):
        assert any(line.endswith(f" {folder}/{name}") for line in lines)
    code = Code(version="1", path=f"/{'p' * 100}/megatron", commit="", dirty=False)
    texts = dict.fromkeys(("script", "script_sha256", "host", "user", "date"), "x")
    run = Run(id="0" * 16, command=(), megatron=code, ttrace=code, environment={}, seed=0, **texts)
    lines = text_of((dataclasses.replace(diverged[0], run=run), diverged[1])).splitlines()
    assert f"           /{'p' * 100}/megatron" in lines


def test_the_next_command_is_given(diverged: Check, conflict: Check, tmp_path: Path) -> None:
    """What to do next; isolation is not proposed to who has it on."""
    text = text_of(diverged, Path("a b"))
    assert "next       open report.html in a browser" in text
    assert "the same with --ttrace-isolate --ttrace-dir 'a b-isolated'" in text
    conflict[0].config["isolate"] = True
    assert "--ttrace-isolate" not in text_of(conflict)
    (tmp_path / "logs").mkdir()
    unable = dataclasses.replace(diverged[0], verdict=Result.COULD_NOT_CHECK)
    assert f"see logs   {tmp_path}/logs\n" in text_of((unable, []), tmp_path)


def test_a_command_can_be_copied(diverged: Check) -> None:
    """Where the job is known, the whole command is there; a shell reads it as it was meant."""
    words = ["ttrace", "check", "--nproc-per-node", "2", "--", "a script.py", "--x=$HOME", "-1"]
    words += [word for number in range(12) for word in (f"--a-flag-{number}", "value")]
    file = io.StringIO()
    terminal.render(*diverged, Console(file=file), Path("out"), words)
    text = file.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    command = text[text.index("ttrace check") :]
    assert shlex.split(command.replace("\\\n", "")) == words
    file = io.StringIO()
    terminal.render(*diverged, Console(file=file), Path("out"), words * 10)
    assert "the same with --ttrace-isolate" in file.getvalue()


def test_a_divergence_without_culprit_shows_the_worst(diverged: Check) -> None:
    """Localisation can fail; the report still says what is wrong."""
    text = text_of((dataclasses.replace(diverged[0], culprits=()), diverged[1]))
    assert "no single module could be named" in text
    assert "51.2×" in text


def test_many_culprits_are_counted(diverged: Check) -> None:
    """The first three in full, five in a line, the rest as a number."""
    (one,) = diverged[0].culprits
    many = tuple(dataclasses.replace(one, explanation=f"cause {n}") for n in range(20))
    text = text_of((dataclasses.replace(diverged[0], culprits=many), diverged[1]))
    assert text.count("culprit    ") == 3
    assert "and 12 more in report.html" in text


def test_culprits_with_one_cause_are_told_once(diverged: Check) -> None:
    """A bug in every layer fills no three screens; unknown causes are not thought to be one."""
    (one,) = diverged[0].culprits
    many = tuple(dataclasses.replace(one, name=f"decoder.layers.{n}", group=1) for n in range(9))
    text = text_of((dataclasses.replace(diverged[0], culprits=many), diverged[1]))
    assert text.count("culprit    ") == 1
    assert "9 with this cause: decoder.layers.* (in" in " ".join(text.split())
    unknown = tuple(
        dataclasses.replace(culprit, explanation="unknown", cause=None, group=0) for culprit in many
    )
    text = text_of((dataclasses.replace(diverged[0], culprits=unknown), diverged[1]))
    assert text.count("culprit    ") == 3
    assert "with this cause" not in text


def norms_not_reduced(layers: int) -> list[Judged]:
    """Known bug 11 in a deep model: the gradients of all norms are partial sums over tp."""
    norms = [
        f"decoder.layers.{layer}.{norm}"
        for layer in range(layers)
        for norm in ("input_layernorm", "pre_mlp_layernorm")
    ]
    names = [*norms, "decoder.final_layernorm", "output_layer"]
    return [
        make_judged(
            f"{name}.{leaf}",
            Kind.MAIN_GRAD,
            verdict=Outcome.PASS if name == "output_layer" else Outcome.REPLICA_CONFLICT,
            rel_err=1e-3 if name == "output_layer" else 0.5,
            microbatch=STEP_LEVEL,
            # Each pipeline stage has ranks of its own.
            ranks=(number % 4, 4 + number % 4),
        )
        for number, name in enumerate(names)
        for leaf in ("weight", "bias")
    ]


def deep_check(layers: int) -> Check:
    """The check that finds this."""

    def explain(verdict: Judged) -> Explanation:
        ranks = FailingRanks(verdict.ranks, 2, 8)
        return Explanation(PartialSums(Cause.PARTIAL, ("tp",)), "there", ranks)

    judged = norms_not_reduced(layers)
    verdicts = [verdict_of(one) for one in judged]
    summary = dataclasses.replace(
        make_summary(verdicts),
        culprits=tuple(localise(judged, explain)),
        execution_order=tuple(dict.fromkeys(owner(one.name) for one in judged)),
    )
    return summary, verdicts


def test_a_deep_model_has_one_culprit_group(tmp_path: Path) -> None:
    """In all layers, on one screen; the same in HTML, JUnit and W&B."""
    check = deep_check(64)
    text = text_of(check)
    before_the_table = text.partition("worst tensor of each layer")[0]
    assert len(before_the_table.splitlines()) < 30
    lines = text.splitlines()
    assert next(n for n, line in enumerate(lines) if line.startswith("tensors")) < 24
    assert max(map(len, lines)) <= 80
    assert text.count("culprit    ") == 1
    assert "also " not in before_the_table
    assert [len(group) for group in table.by_cause(check[0].culprits)] == [129]
    folded = (
        "decoder.layers.*.input_layernorm (in all 64 layers), "
        "decoder.layers.*.pre_mlp_layernorm (in all 64 layers), decoder.final_layernorm"
    )
    assert f"129 with this cause: {folded}" in " ".join(text.split())
    page = html.render(*check)
    assert page.count('<article class="culprit') == 1
    assert "decoder.layers.*.input_layernorm (in all 64 layers)" in page
    failure = ElementTree.fromstring(junit.render(*check)).find(".//failure")
    assert failure is not None
    assert failure.text is not None
    assert failure.text.count("culprit:") == 1
    assert f"all: {folded}" in failure.text
    assert folded in wandb.alert_text(*check)[1]
    assert "more culprit" not in wandb.alert_text(*check)[1]


def test_unknown_causes_are_folded_over_layers() -> None:
    """The same module of several layers is one line, two modules are two."""
    culprits = localise(norms_not_reduced(8))
    assert [len(group) for group in table.by_cause(culprits)] == [8, 8, 1]
    names = [one.name for one in culprits[2:]]
    said = table.folded(table.by_cause(culprits[2:])[0], ["decoder.layers.0.input_layernorm"])
    assert names[0] == "decoder.layers.1.input_layernorm"
    assert said == ["decoder.layers.*.input_layernorm (in 7 of 8 layers: 1-7)"]


def test_a_missing_layer_has_no_number() -> None:
    """Failures without an error are words, not a crash."""
    verdicts = [
        make_verdict("decoder.layers.3", verdict=Outcome.MISSING, rel_err=None, tolerance=None)
    ]
    text = text_of((make_summary(verdicts), verdicts))
    assert "is missing from the candidate" in text


def test_no_answer_is_no_pass() -> None:
    """A check that could not be made says why, in yellow, without an equivalence claim."""
    summary = Summary(
        verdict=Result.COULD_NOT_CHECK,
        counts={},
        culprits=(),
        config={},
        versions={},
        timings={},
        notices=("the reference crashed: see reference/log.txt",),
    )
    text = text_of((summary, []))
    assert text.startswith("ttrace  could not check")
    assert "the reference crashed" in text
    assert "equivalent" not in text


def test_wide_terminals_get_wide_names(diverged: Check) -> None:
    """On a terminal of 120 columns names are not cut at 80."""
    text = text_of(diverged, width=120, force_terminal=True, color_system=None)
    assert "decoder.layers.3.self_attention.core_attention input" in text


@pytest.mark.parametrize(
    ("exactness", "said"),
    [
        (Exactness(7, 0), "7 tensors must be bitwise equal in this layout: all are"),
        (Exactness(7, 2, "decoder.layers.1 output.0", (1,), 1e-9), "2 of 7 tensors are not"),
        (Exactness(7, 2, "decoder.layers.1 output.0", (1,), 1e-9), "decoder.layers.1 output.0"),
    ],
)
def test_exactness_has_a_line_of_its_own(healthy: Check, exactness: Exactness, said: str) -> None:
    """Lost or kept; the answer stays what it is."""
    summary = dataclasses.replace(healthy[0], exactness=exactness)
    text = " ".join(text_of((summary, healthy[1])).split())
    assert text.startswith("ttrace equivalent")
    assert said in text


@pytest.mark.parametrize("what", Unexercised)
def test_what_was_not_exercised_is_told(healthy: Check, what: Unexercised) -> None:
    """Each in words, in 80 columns, without a place for a number left open."""
    names = tuple(f"decoder.layers.{layer}.mlp.router" for layer in range(7))
    one = NotExercised(what, 1234, 5000, names)
    text = text_of((dataclasses.replace(healthy[0], not_exercised=(one,)), healthy[1]), width=80)
    assert text.startswith("ttrace  equivalent  ")
    assert "notice     not exercised: " in text
    assert max(map(len, text.splitlines())) <= 80
    assert not set("{}") & set(text)
    assert "None" not in text


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (
            NotExercised(Unexercised.CLIP, 0.3141, 1.0),
            "gradient clipping (norm 0.314 never exceeded 1)",
        ),
        (NotExercised(Unexercised.UNCHECKED, 150, 5000), "150 of 5,000 tensors (3.0 %): unchecked"),
        (
            NotExercised(Unexercised.IDLE_EXPERTS, 5, 32, ("a", "b", "c", "d", "e")),
            "5 of 32 experts (no token was routed to them: a, b, c, and 2 more)",
        ),
    ],
)
def test_the_numbers_are_told(healthy: Check, one: NotExercised, said: str) -> None:
    """Measured ones in three digits, counts as counts, names up to three."""
    summary = dataclasses.replace(healthy[0], not_exercised=(one,) * 10)
    text = " ".join(text_of((summary, healthy[1])).split())
    assert f"notice not exercised: {said}" in text
    assert "2 more not exercised in summary.json" in text
    page = html.render(summary, healthy[1])
    assert page.count(f"not exercised: {said}") == 10


def test_no_word_of_exactness_where_none_is_expected(healthy: Check) -> None:
    """Tensor parallelism splits every sum."""
    summary = dataclasses.replace(healthy[0], exactness=Exactness(0, 0))
    assert "exactness" not in text_of((summary, healthy[1]))


@pytest.mark.parametrize("width", [24, 40, 59, 60, 80, 120])
@pytest.mark.parametrize("verdict", ["healthy", "diverged"])
def test_a_narrow_terminal(width: int, verdict: str, request: pytest.FixtureRequest) -> None:
    """No line is wider than the terminal, except by what is to be copied: names, paths, words."""
    check = request.getfixturevalue(verdict)
    text = text_of(check, width=width, force_terminal=True, color_system=None)
    for line in text.splitlines():
        assert len(line) <= width or max(map(len, line.split())) > width - 12, line
    assert check[0].verdict.value in text.splitlines()[0]


def test_changed_code(healthy: Check) -> None:
    """By where it ran, the culprit's first; what did not run is not covered by a pass."""
    functions = [
        ChangedFunction("megatron/core/a.py", f"f{number}", number, ran)
        for ran in Execution
        for number in range(1, 7)
    ]
    hostile = ChangedFunction("b\x1b.py", "", 3, Execution.IN_CULPRIT)
    changed = ChangedCode("core_v0.19.0", (*functions, hostile))
    lines = wording.changed_texts(changed)
    assert len(lines) == len(Execution)
    assert lines[0].startswith("changed since core_v0.19.0, and ran in the culprit: megatron/")
    assert "a.py:4 (f4), and 3 more" in lines[0]
    assert "\x1b" not in " ".join(lines)
    assert wording.changed_texts(None) == []
    summary = dataclasses.replace(healthy[0], changed_code=changed)
    text = " ".join(text_of((summary, healthy[1]), width=80).split())
    assert "a pass says nothing about it" in text
    assert Summary.from_json(summary.to_json()) == summary
