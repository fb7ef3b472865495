# SPDX-License-Identifier: Apache-2.0
"""When a mutant has no effect."""

from types import SimpleNamespace

import pytest

from tests.assay.mutants import campaign, survivors, train
from tests.assay.mutants.records import Explanation, Fate


@pytest.mark.parametrize(
    ("trained", "inert"),
    [
        ([["a"], ["a"]], True),
        ([["a"], ["b"]], False),
        ([["a"], [], ["a"]], True),
        ([["a"], [], ["b"]], False),
        ([["a"], [], []], False),
        ([[], ["a"], ["a"], ["a"]], True),
    ],
    ids=["same", "other", "failed-same", "failed-other", "failed-twice", "healthy-failed"],
)
def test_a_run_that_the_machine_ended(monkeypatch, trained, inert):
    """What survives its check trains to its end: a run that did not is repeated, once."""
    one = object.__new__(campaign.Campaign)
    one._healthy, one._survivors, one._unfinished = {}, (), False
    results = iter(trained)
    survived = SimpleNamespace(fate=Fate.SURVIVED)
    monkeypatch.setattr(one, "_fits", lambda mutant: True)
    monkeypatch.setattr(one, "_trained", lambda layout, variables: next(results))
    monkeypatch.setattr(one, "_try", lambda mutant, layout: survived)
    monkeypatch.setattr(train, "encode", lambda mutant: "")
    monkeypatch.setattr(survivors, "explanation_of", lambda *_: (None, ""))
    monkeypatch.setattr(campaign, "MutantRow", lambda *fields: fields)
    [row] = one.run([("mutant", [SimpleNamespace(name="tp2")])])
    assert row[-1] is inert
    assert not list(results)
    assert row[2] is not Explanation.EQUIVALENT
