# SPDX-License-Identifier: Apache-2.0
"""A training loop of somebody's own, of which one step is handed over."""

from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_ttrace
from megatron_ttrace.mcore.fronts import own
from megatron_ttrace.run import own_loop
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.records import Kind, Result, TraceKey
from megatron_ttrace.trace.store import Entry, TraceWriter, seal
from tests.integration.jobs import ROOT, python

HOME = ROOT / "tests" / "own_loop"


def check(tmp_path: Path, *words: str, script: str = "train.py") -> Any:
    """Two ranks, which make their microbatches themselves."""
    done = python(
        *("-m", "megatron_ttrace", "check", "--quiet", "--nproc-per-node", 2),
        *("--ttrace-dir", tmp_path / "out", "--", HOME / script, *words),
        cwd=tmp_path,
        timeout=840,
        cold=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return megatron_ttrace.load_report(tmp_path / "out")


def test_without_a_check():
    """The step is run, and nothing is asked of the model."""
    assert megatron_ttrace.step(len, None, None, [{}, {}]) == 2
    assert not megatron_ttrace.is_reference()


def test_rows_and_length_of_a_microbatch():
    """Those of its ids, whatever comes before them."""
    batch = {
        "name.values": "text",
        "mask": torch.ones(4, 4, dtype=torch.bool),
        "weights": torch.ones(3, 3),
        "number": torch.ones(2, 1, dtype=torch.int64),
        "tokens": torch.ones(2, 4, dtype=torch.int64),
    }
    assert own._shape([batch]) == (2, 4)


def test_an_optimizer_that_is_not_megatrons() -> None:
    """It is refused with what to do; its moments could not be read."""
    with pytest.raises(TTraceError, match="AdamW is not an optimizer of Megatron's: make"):
        own_loop._require(torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))]))


def test_data_parallel(tmp_path: Path) -> None:
    """The reference gets the microbatches of both ranks, although it could not read them itself."""
    report = check(tmp_path, "1")
    assert report.summary.verdict is Result.EQUIVALENT
    assert report.summary.counts["pass"] > 400


def test_gradients_that_are_not_reduced(tmp_path: Path) -> None:
    """Found at the reduction that leaves them out."""
    report = check(tmp_path, "1", "--forget-to-finish")
    assert report.summary.verdict is Result.DIVERGED
    assert report.summary.culprits[0].kind is Kind.COUNTED


@pytest.mark.parametrize("batches", [[], [{"tokens": torch.rand(1, 2)}], [{"text": "a"}]])
def test_microbatches_without_tokens(batches) -> None:
    with pytest.raises(TTraceError, match="give batches"):
        own._shape(batches)


def test_samples_of_different_lengths() -> None:
    """A nested tensor is kept as two plain ones; its microbatch is one packed row."""
    tokens = torch.nested.as_nested_tensor([torch.arange(3), torch.arange(5)], layout=torch.jagged)
    plain = own.flat({"tokens": tokens, "scale": torch.ones(2), "name": "a"})
    assert plain["tokens.values"].tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert plain["tokens.offsets"].tolist() == [0, 3, 8]
    assert own._shape([plain]) == (1, 8)
    again = own.nested(plain)
    assert list(again) == ["tokens", "scale", "name"]
    assert [row.tolist() for row in again["tokens"].unbind()] == [[0, 1, 2], [0, 1, 2, 3, 4]]


def test_numbers_of_microbatches(tmp_path: Path) -> None:
    """The reference gets those of each; its own process may have others."""
    batches = [
        {"tokens": torch.ones(1, 2), "count": n, "share": n / 3, "last": n == 1, "rows": [n, 2]}
        for n in (0, 1)
    ]
    writer = TraceWriter(tmp_path, 0)
    for number, batch in enumerate(batches):
        for name, value in {
            **batch,
            **own.numbers_of({**batch, "text": "a", "big": 1 << 70}),
        }.items():
            writer.add(Entry.of(TraceKey(1, number, Kind.TOKENS, name), value), value)
    writer.close()
    seal(tmp_path, {"role": "batches"})
    others = {"tokens": torch.ones(1, 2), "count": 7, "share": 7.0, "last": False, "text": "b"}
    others["rows"] = [7]
    read = own_loop._read(tmp_path, [others])
    assert [{**batch, "tokens": 0} for batch in read] == [
        {**batch, "tokens": 0, "text": "b"} for batch in batches
    ]


def test_names_that_only_look_nested() -> None:
    """They are left alone."""
    batch = {"a.values": 1, "b.offsets": 2, "c": 3}
    assert own.nested(own.flat(batch)) == batch


def test_tensors_in_containers_are_refused() -> None:
    """The reference would get those of its own first microbatch."""
    for value in ({"weights": torch.ones(2)}, [torch.ones(2)]):
        with pytest.raises(TTraceError, match=r"extra is a \w+ of tensors: give each"):
            own.flat({"tokens": torch.ones(1, 2), "extra": value})


def test_nested_tensors_of_other_forms_are_refused() -> None:
    """Their values and offsets would not be all there is to know."""
    rows = [torch.ones(2, 3), torch.ones(2, 4)]
    for form in (
        torch.nested.nested_tensor(rows),
        torch.nested.nested_tensor(rows, layout=torch.jagged),
    ):
        with pytest.raises(TTraceError, match="mask is a nested tensor"):
            own.flat({"mask": form})


def test_the_page_shows_what_runs() -> None:
    """The code to copy is that of the script."""
    page = (ROOT / "docs" / "trainers.md").read_text()
    code = page.partition("def train_batch(engine")[2].partition("\n```")[0]
    assert code.count("\n") > 25
    assert code in (HOME / "verl_engine.py").read_text()


@pytest.mark.verl
@pytest.mark.parametrize("axis", ["tp", "pp", "cp", "dp"])
def test_engine_of_verl(tmp_path: Path, axis: str) -> None:
    """Its packed microbatches, made by the tokens that they have, are those of the reference."""
    words = () if axis == "dp" else (f"--{axis}", "2")
    report = check(tmp_path, *words, script="verl_engine.py")
    assert report.summary.verdict is Result.EQUIVALENT
    assert report.summary.counts["pass"] > 200


@pytest.mark.verl
@pytest.mark.parametrize(
    ("fault", "kind", "name"),
    [("unscaled", Kind.LOSS, "loss"), ("unfinished", Kind.COUNTED, "")],
)
def test_fault_in_the_engine_of_verl(tmp_path: Path, fault: str, kind: Kind, name: str) -> None:
    """A loss of the wrong scale, gradients that are not reduced."""
    report = check(tmp_path, "--fault", fault, script="verl_engine.py")
    assert report.summary.verdict is Result.DIVERGED
    first = report.summary.culprits[0]
    assert (first.kind, name in first.name) == (kind, True)
